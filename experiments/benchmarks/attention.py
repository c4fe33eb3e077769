"""Attention back ends side by side on the default device: time, parity, tiles, and a whole training step.

    python experiments/benchmarks/attention.py [--lengths=512,2048] [--head_dims=64] [--backends=chunked,reference] [--json]
    python experiments/benchmarks/attention.py --parity   each back end against the fp32 reference, on this device
    python experiments/benchmarks/attention.py --tune     time tiles of the Pallas kernels and write them into their table
    python experiments/benchmarks/attention.py --step     a training step of a model of 1.3e9 parameters, and its MFU
    python experiments/benchmarks/attention.py --all      on a GPU: all of these, the times for D 64 to 256 and T 1k to 32k

Times are medians of 20 runs of forward, and of forward and gradients, in turn, so that a change of the machine's load meets
all alike. `auto` is one of the columns and is timed twice: the ratio of the two is the noise, and its best time over that of
the fastest the share that `auto` reaches. FLOPs are 4 B H T T D for the forward, 2.5 times as much for the backward, half of
it for a causal mask; for a window and packed rows the pairs that are seen are counted.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from llm.attention import MaskSpec, attention
from llm.kernels import backends
from parallel.errors import UserError

DOCUMENTS = 8  # of a packed row
MASKS = dict(
    causal=lambda t: MaskSpec(),
    full=lambda t: MaskSpec(False),
    window=lambda t: MaskSpec(window=(max(t // 8, 1), 0)),
    packed=lambda t: MaskSpec(q_segment_ids=(ids := jnp.arange(t)[None] * DOCUMENTS // t), kv_segment_ids=ids),
)
TOKENS = dict(cpu=4096, gpu=16384)
"""In all rows of a batch together, unless --rows says otherwise."""


def inputs(rows: int, length: int, heads: tuple[int, int], head_dim: int, dtype: str) -> tuple:
    """q, k, v and the gradient of the output."""
    make = lambda i, n: jax.random.normal(jax.random.key(i), (rows, length, n, head_dim), dtype)
    return tuple(make(i, n) for i, n in enumerate((heads[0], heads[1], heads[1], heads[0])))


def able(names: list[str], mask: str, length: int, head_dim: int, dtype: str) -> list[str]:
    """Of these back ends those that can do it here."""
    platform, device = backends.target()
    need = backends.Need(dtype, head_dim, frozenset(MASKS[mask](length).features(length, length)))
    lacks = lambda name: backends.TABLE[name].lacks(need, platform, device if platform == "gpu" else "")
    return [name for name in names if name == "auto" or not lacks(name)]


def passes(backend: str, mask: str, gradients: bool, length: int):
    """The function of (q, k, v, do) that is timed."""

    def run(q, k, v, do):
        attend = functools.partial(attention, mask=MASKS[mask](length), backend=backend)
        if not gradients:
            return attend(q, k, v)
        o, pull = jax.vjp(attend, q, k, v)
        return o, pull(do)

    return jax.jit(run)


def medians(calls: list, repeats: int) -> list[float]:
    """Seconds of each call, in turn; the first turn warms up and does not count."""
    times = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, mine in zip(calls, times):
            start = time.perf_counter()
            jax.block_until_ready(call())
            mine.append(time.perf_counter() - start)
    return [statistics.median(mine[1:]) for mine in times]


def seen_pairs(mask: str, length: int) -> int:
    """Pairs of a query and a key that it sees, in one row."""
    lo, hi = MASKS[mask](length).intervals(length, length)
    return int(np.maximum(np.asarray(hi, np.int64) - np.asarray(lo), 0).sum())


def cell(names: list[str], mask: str, gradients: bool, arrays: tuple, repeats: int) -> dict:
    """One row of the table: milliseconds and TFLOP/s of each back end, the noise, and the share that auto reaches."""
    rows, length, heads, head_dim = arrays[0].shape
    compiled, seconds = {}, {}
    for name in names:
        start = time.perf_counter()
        compiled[name] = passes(name, mask, gradients, length).lower(*arrays).compile()
        seconds[name] = time.perf_counter() - start
    order = [*names, names[0]]
    *middle, again = medians([functools.partial(compiled[name], *arrays) for name in order], repeats)
    flops = 4 * rows * heads * head_dim * seen_pairs(mask, length) * (3.5 if gradients else 1)
    found = dict(length=length, rows=rows, head_dim=head_dim, mask=mask, gradients=gradients)
    found["noise"] = round(again / middle[0], 3)
    if names[0] == "auto":
        found["auto_of_best"] = round(min(*middle, again) / min(middle[0], again), 3)
    for name, s in zip(names, middle):
        found[name] = dict(ms=round(1e3 * s, 4), tflops=float(f"{flops / s / 1e12:.4g}"), compile_s=round(seconds[name], 2))
    return found


def text(found: dict) -> str:
    """A row of the table for people."""
    names = [name for name, value in found.items() if isinstance(value, dict)]
    what = f"D {found['head_dim']:<4} T {found['length']:<6} {found['mask']:<7} {'fwd+bwd' if found['gradients'] else 'fwd':<8}"
    times = "  ".join(f"{name} {found[name]['ms']:.3f} ms ({found[name]['tflops']:.3g} TFLOP/s)" for name in names)
    share = f"  auto/best {found['auto_of_best']:.3f}" if "auto_of_best" in found else ""
    return f"{what} {times}  noise {found['noise']:.3f}{share}"


def parity(names: list[str], mask: str, length: int, heads: tuple[int, int], head_dim: int, dtype: str) -> dict:
    """The error of each back end and of the reference in `dtype` from the reference in fp32: the worst of output and gradients,
    each relative to its largest number. Right: within twice that of the reference (1e-5 in fp32)."""
    arrays = inputs(2, length, heads, head_dim, dtype)

    def error(name):
        got = passes(name, mask, True, length)(*arrays)
        worst = lambda a, b: float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-6))
        return max(jax.tree.leaves(jax.tree.map(worst, got, exact)))

    with jax.default_matmul_precision("highest"):  # no tf32 in the oracle
        exact = passes("reference", mask, True, length)(*(a.astype(jnp.float32) for a in arrays))
        errors = {name: error(name) for name in ("reference", *names)}
    allowed = max(2 * errors["reference"], 1e-5)
    right = {name: errors[name] <= allowed for name in names}
    return dict(mask=mask, length=length, head_dim=head_dim, dtype=dtype, errors=errors, right=right)


def parse() -> argparse.Namespace:
    numbers, names = (lambda text: [int(n) for n in text.split(",")]), (lambda text: text.split(","))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for what in ("parity", "tune", "step", "all"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--lengths", type=numbers)
    parser.add_argument("--head_dims", type=numbers)
    parser.add_argument("--backends", type=names, help="the first is timed twice")
    parser.add_argument("--masks", type=names, default=["causal", "packed", "window"])
    parser.add_argument("--dtype", help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--rows", type=int, default=0, help="rows of the batch; 0: as many as make 4096 tokens (GPU: 16384)")
    parser.add_argument("--heads", type=numbers, help="of queries, of keys")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--table", type=Path, help="--tune: the file to write, else that of the kernels")
    parser.add_argument("--interpret", action="store_true", help="--tune on a CPU, to try the command: the times mean nothing")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    gpu = backends.target()[0] == "gpu"
    a.lengths = a.lengths or ([1024, 2048, 4096, 8192, 16384, 32768] if a.all else [2048, 8192] if gpu else [128, 512, 2048])
    a.head_dims = a.head_dims or ([64, 128, 256] if a.all or a.tune else [128] if gpu else [64])
    a.heads = a.heads or ([16, 4] if gpu else [4, 2])
    a.dtype = a.dtype or ("bfloat16" if gpu else "float32")
    a.backends = a.backends or (["auto", "pallas", "mosaic", "cudnn", "tokamax"] if gpu else ["auto", "reference"])
    return a


def check(a: argparse.Namespace) -> None:
    """Raises UserError for what cannot be."""
    if (a.all or a.step or a.tune) and backends.target()[0] != "gpu" and not (a.tune and a.interpret):
        asked = "--all" if a.all else "--step" if a.step else "--tune"
        raise UserError(f"{asked} times a GPU and there is none here: run it on one (--tune --interpret tries the command)")
    if unknown := [name for name in a.backends if name not in ("auto", *backends.TABLE)]:
        raise UserError(f"--backends={','.join(unknown)}: there are auto, {', '.join(backends.TABLE)}")
    if unknown := [name for name in a.masks if name not in MASKS]:
        raise UserError(f"--masks={','.join(unknown)}: there are {', '.join(MASKS)}")
    if a.dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"--dtype={a.dtype}: there are float32, bfloat16, float16")
    if len(a.heads) != 2 or min(a.heads) < 1 or a.heads[0] % a.heads[1]:
        raise UserError(f"--heads={','.join(map(str, a.heads))}: two numbers, the first a multiple of the second")
    if min(*a.lengths, *a.head_dims, a.repeats) < 1 or a.rows < 0:
        raise UserError("--lengths, --head_dims and --repeats are 1 or more, --rows is 0 or more")


def main() -> None:
    a = parse()
    check(a)
    done = []

    def show(row: dict, line: str) -> None:
        done.append(row)
        print(line, file=sys.stderr if a.json else sys.stdout, flush=True)

    if a.parity or a.all:
        for mask in a.masks:
            for head_dim in a.head_dims:
                names = able([n for n in a.backends if n not in ("auto", "reference")], mask, 1000, head_dim, a.dtype)
                row = parity(names, mask, 1000, tuple(a.heads), head_dim, a.dtype)
                errors = "  ".join(f"{name} {error:.2e}" for name, error in row["errors"].items())
                wrong = [name for name, right in row["right"].items() if not right]
                show(row, f"parity D {head_dim:<4} {mask:<7} {errors}  {'WRONG: ' + ', '.join(wrong) if wrong else 'right'}")
    if a.tune or a.all:
        from experiments.benchmarks import attention_tune

        for row in attention_tune.tune(a, medians):
            show(row, json.dumps(row))
    if a.step or a.all:
        from experiments.benchmarks import attention_step

        row = attention_step.step(medians)
        show(row, json.dumps(row))
    if a.all or not (a.parity or a.tune or a.step):
        for head_dim in a.head_dims:
            for length in a.lengths:
                rows = a.rows or max(1, TOKENS["gpu" if backends.target()[0] == "gpu" else "cpu"] // length)
                arrays = inputs(rows, length, tuple(a.heads), head_dim, a.dtype)
                for mask in a.masks:
                    for gradients in (False, True):
                        row = cell(able(a.backends, mask, length, head_dim, a.dtype), mask, gradients, arrays, a.repeats)
                        show(row, text(row))
    if a.json:
        print(json.dumps(dict(device=jax.devices()[0].device_kind, jax=jax.__version__, rows=done)))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"attention.py: {error}", file=sys.stderr)
        sys.exit(2)
