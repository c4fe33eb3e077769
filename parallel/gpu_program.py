"""What one execution of a compiled, scheduled program does on one GPU: communication by axis, kernels, matrix products.

Everything is read from the text of the program (`compiled.as_text()`), whose instructions are in the order in which they
start. Loops count with their turns. A branch counts as often as `share` says that it is taken."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from parallel import hlo

Share = Callable[[str], float]
"""From the source of a conditional to the share of its executions that take the branch that does something."""


def always(source: str) -> float:
    """Every branch is taken."""
    return 1.0


def times(instruction: hlo.Instruction, share: Share = always) -> float:
    """How often an instruction runs in one execution; a loop that does not tell its turns counts once."""
    turns = math.prod(n or 1 for n in instruction.loops)
    return turns * (share(instruction.branch) if instruction.branches else 1.0)


def matmul_flops(found: list[hlo.Instruction], share: Share = always) -> float:
    """FLOPs of the matrix products, those inside of kernels such as attention's not counted."""
    return sum(i.flops * times(i, share) for i in found)


def collectives(found: list[hlo.Instruction], sizes: Mapping[str, int], share: Share = always) -> list[dict[str, Any]]:
    """Rows of {kind, axis, count, bytes, in_loop, overlapped}, the most bytes first.

    axis: the mesh axes that it crosses, joined by +. count: executions. bytes: of the whole arrays (what an all-gather makes,
    a reduce-scatter takes), times count. overlapped: a matrix product or a kernel is scheduled between start and end."""
    rows: dict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0])
    hidden = overlaps(found)
    for c in found:
        if isinstance(c, hlo.Collective) and (axes := _axes(c, sizes)):
            key = (c.kind, axes, bool(c.loops), bool(hidden.get(c.begun)))
            rows[key][0] += times(c, share)
            rows[key][1] += times(c, share) * whole_bytes(c)
    fields = ("kind", "axis", "in_loop", "overlapped")
    made = [dict(zip(fields, key)) | dict(count=round(n), bytes=round(size)) for key, (n, size) in rows.items()]
    order = ("kind", "axis", "count", "bytes", "in_loop", "overlapped")
    return [{name: row[name] for name in order} for row in sorted(made, key=lambda row: -row["bytes"])]


def whole_bytes(c: hlo.Collective) -> int:
    """Bytes of the arrays that a collective makes or takes, whichever is more."""
    return c.bytes * (len(c.groups[0]) if c.kind == "reduce-scatter" else 1)


def _axes(c: hlo.Collective, sizes: Mapping[str, int]) -> str:
    return "+".join(c.axes(sizes))


def overlaps(found: list[hlo.Instruction]) -> dict[tuple, list[hlo.Instruction]]:
    """For each collective that is begun and awaited, (path, name) of what begins it, the compute scheduled in between: the
    matrix products and kernels that run in every case."""
    begun = {c.begun: at for at, c in enumerate(found) if isinstance(c, hlo.Collective) and c.begun}
    between = {}
    for at, done in enumerate(found):
        for start in [(done.path, name) for name in done.operands]:
            if start in begun and start not in between:
                first = found[begun[start]]
                own = first.path if first.path != done.path else None  # a collective inside of a fusion that is begun
                inside = [i for i in found[begun[start] + 1 : at] if i.branches == first.branches and i.path != own]
                between[start] = [i for i in inside if computes(i)]
    return between


def computes(i: hlo.Instruction) -> bool:
    """Whether this is a matrix product or a kernel written by hand."""
    return i.flops > 0 or (i.kind == "custom-call" and i.target.startswith(KERNELS))


KERNELS = ("__gpu$xla.gpu.triton", "mosaic_gpu", "__cudnn", "__cublas")
FUSIONS = dict(kLoop="elementwise fusion", kInput="reduction fusion", kCustom="custom fusion", kOutput="output fusion")


def kernels(found: list[hlo.Instruction], share: Share = always) -> list[dict[str, Any]]:
    """Rows of {name, count}: launches of kernels on one GPU, the most first."""
    products = {i.path for i in found if i.fused and i.flops}
    counts: Counter[str] = Counter()
    for i in found:
        if not i.fused and (name := kernel_name(i, products)):
            counts[name] += times(i, share)
    return [dict(name=name, count=round(n)) for name, n in counts.most_common()]


def kernel_name(i: hlo.Instruction, products: Collection[tuple[str, ...]]) -> str:
    """The kernel that an instruction launches, "" when none. products: paths of fused computations with a matrix product."""
    if i.kind == "fusion":
        mine = any((*i.path, callee) in products for callee in i.calls)
        return "triton matmul" if mine else FUSIONS.get(i.target, i.target)
    if i.kind != "custom-call":
        return {"copy": "copy", "sort": "sort"}.get(i.kind, "")
    if i.target.startswith("__cublas"):
        return "cublas matmul"
    if i.target.startswith("__cudnn"):
        return "cudnn " + i.target.removeprefix("__cudnn").strip("$")
    if i.target.startswith(KERNELS):  # written by hand: its own name follows, or is in its place in the program
        back_end, _, name = i.target.rpartition(" ")
        if not back_end:
            back_end, name = i.target, i.source.rpartition("/")[0].rpartition("/")[2]
        return f"{'mosaic' if 'mosaic' in back_end else 'triton'} {name}"
    return i.target


def parameter_copies(found: list[hlo.Instruction], shapes: Collection[tuple[str, tuple[int, ...]]]) -> list[hlo.Instruction]:
    """The instructions that copy a layer's weights out of the stack of all of them, to be read by something else.

    shapes: (type, dimensions) of the stacked weights [chunks, slots, ...] of one GPU. The compiler may have moved dimensions,
    and may copy several weights side by side; what is sliced to be added to and written back is an accumulator."""
    plain = lambda dims: tuple(sorted(n for n in dims if n > 1))
    layers = {(dtype, plain(dims[2:])) for dtype, dims in shapes}
    written = {(*i.path, callee): i.results for i in found if i.kind == "fusion" for callee in i.calls}
    updating = {i.path for i in found if i.kind == "dynamic-update-slice"}

    def copies(i: hlo.Instruction) -> bool:
        dtype, dims = i.results[0]
        if (dtype, plain(dims)) not in layers or (i.fused and i.path in updating):
            return False
        return not i.fused or any(t == dtype and math.prod(d) >= math.prod(dims) for t, d in written.get(i.path, ()))

    return [i for i in found if i.kind == "dynamic-slice" and copies(i)]
