"""Sizes of tiles of the Pallas kernels: the first row of pallas_blocks.json that fits a GPU, head size, type and mask.

A row serves head sizes up to its own; "" stands for any GPU or mask. Its numbers are rows of queries, of keys, warps and
stages of the pipeline that loads tiles. They are start values, chosen by the shared memory that they take, not measured."""

import dataclasses
import functools
import json
from pathlib import Path

from llm.kernels.options import Options

SMALLEST = 16  # rows of a tensor core's tile


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows of queries and of keys in a tile, warps, stages."""

    q: int
    k: int
    warps: int = 4
    stages: int = 1


@functools.cache
def _table() -> list[dict]:
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n nor below what a tensor core takes."""
    return max(SMALLEST, 1 << (n - 1).bit_length())


def blocks(kernel: str, options: Options, head_dim: int, bits: int, queries: int, keys: int) -> Blocks:
    """Those of `forward`, `dq` or `dkv`; never larger than what is needed for so many queries and keys."""
    if options.block:
        chosen = Blocks(options.block, options.block_k or options.block)
    else:

        def fits(row):
            gpu, mask = row["gpu"] in options.device, row["mask"] in ("", options.mask)
            return gpu and mask and head_dim <= row["head_dim"] and bits <= row["bits"]

        chosen = Blocks(*next(row for row in _table() if fits(row))[kernel])
    return dataclasses.replace(chosen, q=min(chosen.q, power_of_two(queries)), k=min(chosen.k, power_of_two(keys)))
