"""Tiles of the Pallas attention kernels, timed on this GPU (attention.py --tune).

For each head size and mask, each of the three kernels by itself climbs from the tiles that the table has: rows of queries,
rows of keys, warps and stages are halved, doubled or changed by one in turn, and the fastest neighbour is taken until none is
faster by more than 1 %. Tiles that need more shared memory than a block of this GPU has are not tried, and those that do not
compile are left out. What is found is written into the table, one row for this GPU, head size, type and mask."""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from llm.kernels import backends, pallas_attention, pallas_blocks
from llm.kernels.options import Options
from llm.kernels.pallas_blocks import Blocks

KERNELS = ("forward", "dq", "dkv")
ENOUGH = 0.99
SHARED = (("A100", 163), *((name, 227) for name in backends.HOPPER + backends.BLACKWELL), ("", 99))
"""KiB of shared memory that a block may ask for, by what the name of a GPU holds."""


def neighbours(b: Blocks) -> Iterator[Blocks]:
    """Tiles that differ in one number."""
    for name, low, high in (("q", 16, 256), ("k", 16, 256), ("warps", 2, 8)):
        for n in (getattr(b, name) // 2, getattr(b, name) * 2):
            if low <= n <= high:
                yield dataclasses.replace(b, **{name: n})
    for n in (b.stages - 1, b.stages + 1):
        if 1 <= n <= 4:
            yield dataclasses.replace(b, stages=n)


def climb(start: Blocks, fits: Callable[[Blocks], bool], seconds: Callable[[list[Blocks]], list[float]]) -> tuple:
    """(fastest tiles, their seconds, how many were tried); `seconds` times several side by side, inf where one cannot be."""
    best, tried = start, {start}
    while True:
        new = [b for b in dict.fromkeys(neighbours(best)) if b not in tried and fits(b)]
        tried.update(new)
        now, *times = seconds([best, *new])
        fastest = min(times, default=float("inf"))
        if fastest >= ENOUGH * now:
            return best, now, len(tried)
        best = new[times.index(fastest)]


def tune(a: argparse.Namespace, medians: Callable) -> Iterator[dict]:
    """Times and writes; yields each row of the table as it is found. a: the arguments of attention.py."""
    from experiments.benchmarks.attention import TOKENS, inputs

    gpu, length = backends.target()[0] == "gpu", max(a.lengths)
    rows = a.rows or max(1, TOKENS["gpu" if gpu else "cpu"] // length)
    for head_dim in a.head_dims:
        arrays = inputs(rows, length, tuple(a.heads), head_dim, a.dtype)
        for mask in a.masks:
            row = best_row(mask, arrays, functools.partial(medians, repeats=a.repeats))
            write(row, a.table)
            yield row


def best_row(mask: str, arrays: tuple, medians: Callable) -> dict:
    """The row of the table for this mask and arrays (q, k, v, do), with the microseconds that its kernels took."""
    from experiments.benchmarks.attention import MASKS

    platform, device = backends.target()
    (_, length, _, head_dim), bits = arrays[0].shape, 8 * arrays[0].dtype.itemsize
    options = Options(head_dim**-0.5, None, "pallas", device if platform == "gpu" else "", mask)
    memory = 1024 * next(kib for part, kib in SHARED if part in device)
    padded = pallas_blocks.power_of_two(head_dim)
    rows = pallas_attention.prepare(MASKS[mask](length), length, length, options)
    q, k, v, do = arrays
    _, lse = jax.jit(lambda q, k, v: pallas_attention.forward(q, k, v, None, rows, options))(q, k, v)
    given = q, k, v, do, lse, jnp.zeros_like(lse), rows
    row = dict(gpu=device if platform == "gpu" else "interpreted", head_dim=head_dim, bits=bits, mask=mask)
    times = {}
    for kernel in KERNELS:

        def seconds(some, kernel=kernel):
            calls = {b: call for b in some if (call := compiled(kernel, b, options, given))}
            found = dict(zip(calls, medians(list(calls.values()))))
            return [found.get(b, float("inf")) for b in some]

        def fits(b, kernel=kernel):
            whole = max(b.q, b.k) <= pallas_blocks.power_of_two(length)
            return whole and pallas_blocks.shared_bytes(kernel, b, padded, bits) <= memory

        start = Blocks(*pallas_blocks.row_for(options.device, mask, head_dim, bits)[kernel])
        best, took, tried = climb(start, fits, seconds)
        print(f"{kernel} D {head_dim} {mask}: {best}, {1e6 * took:.0f} us, the best of {tried}", file=sys.stderr)
        row[kernel], times[kernel] = list(dataclasses.astuple(best)), round(1e6 * took, 1)
    return row | dict(us=times)


def compiled(kernel: str, b: Blocks, options: Options, given: tuple) -> Callable | None:
    """One kernel with these tiles, or None where it does not compile; the compiler drops what the result does not need."""
    options = dataclasses.replace(options, block=b.q, block_k=b.k, warps=b.warps, stages=b.stages)

    def run(q, k, v, do, lse, delta, rows):
        if kernel == "forward":
            return pallas_attention.forward(q, k, v, None, rows, options)
        dq, dk, dv, _ = pallas_attention.backward(q, k, v, None, rows, lse, do, delta, options)
        return dq if kernel == "dq" else (dk, dv)

    try:
        return functools.partial(jax.jit(run).lower(*given).compile(), *given)
    except Exception as error:  # of the assembler or the driver: whatever it is, these tiles are of no use
        print(f"{kernel} {b} does not compile: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        return None


def write(row: dict, path: Path | None) -> None:
    """The row into the table, in place of one for the same, before all others."""
    path = path or Path(pallas_blocks.__file__).with_suffix(".json")
    old = json.loads(path.read_text()) if path.exists() else pallas_blocks.table()
    same = lambda other: all(other[key] == row[key] for key in ("gpu", "head_dim", "bits", "mask"))
    lines = [json.dumps(r) for r in [row, *(r for r in old if not same(r))]]
    part = path.with_suffix(".part")
    part.write_text("[\n  " + ",\n  ".join(lines) + "\n]\n")
    part.replace(path)
