"""What a program asks for (its jaxpr), and what its compiled form communicates and holds (its HLO text), as plain data.

A collective in a loop runs in every turn of it, one in a branch only when the branch is taken: where a collective is
is what cost tests and a planner ask. Reads the text of XLA:CPU, and the asynchronous forms that XLA:GPU writes."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend import core

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
COLLECTIVES = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "reduce_scatter", "ppermute", "all_to_all")
"""Primitives of a jaxpr that communicate."""

LOOPS = ("scan", "while")
"""Primitives of a jaxpr whose body runs more than once."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][a-z-]*)\(")
_CALLED = re.compile(r"\b(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)")
_CALLED_LISTS = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program, on one device.

    kind: its opcode. results: (type, dimensions) of each result. loops: the number of turns of each loop around it, the
    outermost first, 0 where the program does not say. branches: conditionals around it. fused: it is inside a fusion, so
    its results are not written to memory. source: the place in the traced program that it comes from. path: the computations
    around it, of which the last lists it. operands, calls: names (calls: of computations). branch: the source of the outermost
    conditional around it.
    target: what a custom call calls (and a kernel's name), or the kind of a fusion. flops: of a matrix product, else 0."""

    name: str
    kind: str
    results: tuple[tuple[str, tuple[int, ...]], ...]
    loops: tuple[int, ...]
    branches: int
    fused: bool
    source: str
    path: tuple[str, ...]
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    branch: str
    target: str
    flops: int

    @property
    def bytes(self) -> int:
        """Bytes of the results on one device."""
        return sum(bytes_of(dtype, dims) for dtype, dims in self.results)

    @property
    def times(self) -> int:
        """How often it runs in one execution of the program, if every branch around it is taken; 0: not known."""
        return math.prod(self.loops)


@dataclasses.dataclass(frozen=True)
class Collective(Instruction):
    """A collective: kind is one of KINDS. groups: the partitions that communicate, or a permute's (source, target).
    begun: path and name of the instruction that begins it, when another awaits it."""

    groups: tuple[tuple[int, ...], ...]
    begun: tuple[tuple[str, ...], str] | None = None

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes that it crosses, for a mesh of `sizes` (outermost axis first) in the order of the devices."""
        shape, found = tuple(sizes.values()), set()
        for group in self.groups:
            places = np.array(np.unravel_index(group, shape))
            found.update(np.flatnonzero((places != places[:, :1]).any(1)))
        return tuple(name for i, name in enumerate(sizes) if i in found)


def instructions(text: str) -> list[Instruction]:
    """The instructions of a compiled program, `compiled.as_text()`, those of a computation at each place that calls it.

    A collective that has begun and is awaited is there once. Raises ValueError when the text has no entry."""
    computations, entry = _computations(text)
    partitions = re.search(r"num_partitions=(\d+)", text)
    everyone = tuple(range(int(partitions[1]) if partitions else 1))
    groups = functools.lru_cache(maxsize=None)(lambda code: _groups(code, everyone))
    found = []

    def visit(name, around, loops, branch, branches, fused, begun) -> None:
        path, shapes = (*around, name), {}
        for line in computations.get(name, ()):
            code, _, meta = re.sub(r"/\*.*?\*/", "", line).partition(", metadata={")
            match = _INSTRUCTION.match(code)
            if not match:
                continue
            called = [(key, [callee]) for key, callee in _CALLED.findall(code)]
            called += [(key, re.findall(r"[\w.-]+", names)) for key, names in _CALLED_LISTS.findall(code)]
            kind = match[3].removesuffix("-start")
            begins, mine = kind != match[3], begun
            if begins and begun is None:
                mine = path, match[1]
            wrapper = begins and kind in KINDS and any(key in ("calls", "called_computations") for key, _ in called)
            told = re.search(r'op_name="([^"]*)"', meta)
            source = told[1] if told else ""
            if not wrapper:  # what it wraps is met below
                collective = kind in KINDS
                shape = _elements(match[2])[1] if collective and begins and kind != "all-reduce" else match[2]
                results = _results(shape)
                shapes[match[1]] = _results(match[2])
                operands = tuple(re.findall(r"%([\w.-]+)", code[match.end() :].partition("), ")[0]))
                target = re.search(r'(?:custom_call_target="|kind=)([^",]*)', code)
                kernel = re.search(r' name = "(\w+)"', line) if match[3] == "custom-call" else None
                flops = _flops(match[3], code + meta, results, [shapes.get(name, ()) for name in operands])
                common = match[1], kind if collective else match[3], results, loops, branches, fused, source
                common = (
                    *common,
                    path,
                    operands,
                    tuple(callee for _, names in called for callee in names),
                    branch,
                    " ".join(found[1] for found in (target, kernel) if found),
                    flops,
                )
                found.append(Collective(*common, groups(_group_text(code)), mine) if collective else Instruction(*common))
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for key, names in called:
                inside = (*loops, int(trips[1]) if trips else 0) if key in ("body", "condition") else loops
                branching = key.endswith(("_computation", "branch_computations"))
                within = fused or match[3] in ("fusion", "fusion-start")
                where = (branch or source) if branching else branch
                for callee in names:
                    visit(callee, path, inside, where, branches + branching, within, mine)

    visit(entry, (), (), "", 0, False, None)
    return found


def _flops(kind: str, line: str, results: tuple, operands: list) -> int:
    """Multiplications and additions of a matrix product, from its contracted dimensions."""
    contracted = re.search(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)", line)
    if not (kind == "dot" or (kind == "custom-call" and contracted)) or not operands or not operands[0]:
        return 0
    dims = [int(d) for d in re.findall(r"\d+", contracted[1])] if contracted else []
    return 2 * math.prod(results[0][1]) * math.prod(operands[0][0][1][d] for d in dims)


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, `compiled.as_text()`; see `instructions`."""
    return [i for i in instructions(text) if isinstance(i, Collective)]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of every computation, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line.startswith(" "):
            lines.append(line.strip())
    if not entry:
        raise ValueError("this is not the text of a compiled program: there is no ENTRY computation")
    return computations, entry


def _group_text(code: str) -> str:
    """What an instruction says of its groups, which many share."""
    found = re.search(r"(?:replica_groups|source_target_pairs)=.*", code)
    return found[0] if found else ""


def _groups(code: str, everyone: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The members of each group, in any form that XLA writes; `{}` and nothing mean one group of all."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", code)
    if listed:
        return tuple(_integers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    iota, mesh = _IOTA_GROUPS.search(code), _MESH_GROUPS.search(code)
    if iota:
        ids = _iota(*iota.groups()[1:]).reshape(_integers(iota[1]))
    elif mesh:
        ids = _along(mesh[1], mesh[2], mesh[3])
    elif re.search(r"replica_groups=(?!\{\})", code):
        raise ValueError(f"replica groups of an unknown form: {code}")
    else:
        return (everyone,)
    return tuple(tuple(int(i) for i in group) for group in ids)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in text.split(","))


def _iota(dims: str, order: str | None) -> np.ndarray:
    """The ids 0, 1, ... in the given dimensions, transposed."""
    dims = _integers(dims)
    return np.arange(math.prod(dims)).reshape(dims).transpose(_integers(order) if order else None)


def _along(mesh: str, devices: str | None, inside: str) -> np.ndarray:
    """The groups [n, members] along the axes `inside`, "'a', 'b':(before)size", of a mesh "'a'=4,'b'=8" of devices, an
    iota or a list of ids. An axis may be cut: only `size` of its places, each `before` times, are inside."""
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh)}
    cuts = {name: (before, n) for name, before, n in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", inside)}
    dims, own = [], []
    for name, size in sizes.items():
        before, n = (int(c or d) for c, d in zip(cuts.get(name, (size, 1)), (1, size)))
        own += [len(dims) + 1] if name in cuts else []
        dims += [before, n, size // before // n]
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices or "")
    ids = _iota(*iota.groups()) if iota else np.array(_integers(devices)) if devices else np.arange(math.prod(dims))
    order = [i for i in range(len(dims)) if i not in own] + own
    return ids.reshape(dims).transpose(order).reshape(-1, math.prod(dims[i] for i in own))


def _results(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Types and dimensions of the arrays in a result's shape."""
    return tuple((t, tuple(int(d) for d in dims.split(",") if d)) for t, dims in _SHAPE.findall(shape))


def _elements(shape: str) -> list[str]:
    """The elements of a tuple shape, as text."""
    parts, depth, start = [], 0, 1
    for i, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(shape[start:i].strip())
            start = i + 1
    return parts


def bytes_of(dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes of an array of one of XLA's types."""
    return -(-math.prod(dims) * _bits(dtype) // 8)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program on one device. `temporaries` is what it needs beside arguments and results."""

    arguments: int
    results: int
    aliased: int
    temporaries: int


def memory(compiled: Any) -> Memory:
    """What XLA allocates for a compiled program (`jit(f).lower(...).compile()`)."""
    m = compiled.memory_analysis()
    return Memory(m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes)


def equations(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> Iterator[tuple[core.JaxprEqn, tuple[str, ...]]]:
    """Every equation of a jaxpr and of those inside it, with the names of the primitives around it, outermost first."""

    def walk(jaxpr, around):
        for equation in jaxpr.eqns:
            yield equation, around
            for inner in _inner(list(equation.params.values())):
                yield from walk(inner, (*around, equation.primitive.name))

    return walk(getattr(jaxpr, "jaxpr", jaxpr), ())


def _inner(values: Any) -> Iterator[core.Jaxpr]:
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _inner(value)


def count_equations(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> int:
    """The number of equations of a jaxpr and of all inside it: what tracing and compiling pay for."""
    return sum(1 for _ in equations(jaxpr))


@dataclasses.dataclass(frozen=True)
class Request:
    """A collective that a program's author asked for: a primitive of COLLECTIVES, the mesh axes that it names, (type,
    dimensions) of an operand on one device (axes left to the compiler not divided), and whether a loop is around it."""

    primitive: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    looped: bool


def requests(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> list[Request]:
    """The collectives that a jaxpr asks for, one entry an operand; those that name no axis are left out."""
    found = []
    for equation, around in equations(jaxpr):
        name = equation.primitive.name
        if name in COLLECTIVES:
            axes = equation.params.get("axes", equation.params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else tuple(a for a in axes if isinstance(a, str))
            avals = [v.aval for v in equation.invars]
            looped = any(outer in LOOPS for outer in around)
            found += [Request(name, axes, str(a.dtype), tuple(a.shape), looped) for a in avals if axes]
    return found
