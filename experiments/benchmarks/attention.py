"""Time of the attention back ends side by side, forward and forward with gradients, on the default device.

    python experiments/benchmarks/attention.py [--lengths=128,512,2048] [--backends=reference,chunked] [--dtype=float32]

Per cell the median of the given number of runs, in turns, so that noise meets all alike; the first back end is timed twice
and the ratio of the two is the noise. Prints one JSON line a cell: milliseconds, ratio to the first, seconds to compile.
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

MASKS = dict(
    causal=lambda t: MaskSpec(),
    window=lambda t: MaskSpec(window=(t // 8, 0)),
    packed=lambda t: MaskSpec(q_segment_ids=(ids := jnp.arange(t)[None] * 8 // t), kv_segment_ids=ids),
)


def compiled(backend: str, mask: str, gradients: bool, arrays: tuple):
    """(function of arrays, seconds to compile)."""
    length = arrays[0].shape[1]

    def run(q, k, v, do):
        attend = functools.partial(attention, mask=MASKS[mask](length), backend=backend)
        if not gradients:
            return attend(q, k, v)
        o, pull = jax.vjp(attend, q, k, v)
        return o, pull(do)

    start = time.perf_counter()
    return jax.jit(run).lower(*arrays).compile(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    numbers = lambda text: [int(n) for n in text.split(",")]
    parser.add_argument("--lengths", type=numbers, default=[128, 512, 2048])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["reference", "chunked"])
    parser.add_argument("--masks", type=lambda text: text.split(","), default=list(MASKS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=0, help="rows of the batch; 0: 4096 tokens in all")
    parser.add_argument("--heads", type=numbers, default=[4, 2], help="of queries, of keys")
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    a = parser.parse_args()
    for length in a.lengths:
        rows, (heads, groups) = a.rows or max(1, 4096 // length), a.heads
        shapes = [(rows, length, n, a.head_dim) for n in (heads, groups, groups, heads)]
        arrays = tuple(jnp.asarray(np.random.default_rng(i).normal(size=s), a.dtype) for i, s in enumerate(shapes))
        for mask in a.masks:
            for gradients in (False, True):
                runs = {name: compiled(name, mask, gradients, arrays) for name in a.backends}
                order = [*a.backends, a.backends[0]]
                times = [[] for _ in order]
                for _ in range(a.repeats + 1):
                    for i, name in enumerate(order):
                        start = time.perf_counter()
                        jax.block_until_ready(runs[name][0](*arrays))
                        times[i].append(time.perf_counter() - start)
                *middle, again = (1e3 * statistics.median(t[1:]) for t in times)
                cell = dict(length=length, rows=rows, mask=mask, gradients=gradients, noise=round(again / middle[0], 3))
                for name, ms in zip(a.backends, middle):
                    cell[name] = dict(ms=round(ms, 3), ratio=round(ms / middle[0], 3), compile_s=round(runs[name][1], 2))
                print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
