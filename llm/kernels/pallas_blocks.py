"""Sizes of tiles of the Pallas kernels: the row of pallas_blocks.json for a GPU, head size, type and mask.

A row serves head sizes and types up to its own; "" stands for any GPU or mask, names are separated by |. Its numbers are rows
of queries, of keys, warps and stages of the pipeline that loads tiles. Those of rows without "us" are start values, chosen by
the shared memory that they take; experiments/benchmarks/attention.py --tune adds rows that are measured."""

import dataclasses
import functools
import json
import re
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
def table() -> list[dict]:
    """The rows, the first of equals counts."""
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n nor below what a tensor core takes."""
    return max(SMALLEST, 1 << (n - 1).bit_length())


def row_for(device: str, mask: str, head_dim: int, bits: int) -> dict:
    """The row for the smallest head size and type that fit, of those the first."""

    def fits(row):
        gpu = not row["gpu"] or re.search(rf"\b({row['gpu']})\b", device)
        return gpu and row["mask"] in ("", mask) and head_dim <= row["head_dim"] and bits <= row["bits"]

    return min(filter(fits, table()), key=lambda row: (row["head_dim"], row["bits"]))


def blocks(kernel: str, options: Options, head_dim: int, bits: int, queries: int, keys: int) -> Blocks:
    """Those of `forward`, `dq` or `dkv`; never larger than what is needed for so many queries and keys."""
    if options.block:
        chosen = Blocks(options.block, options.block_k or options.block, options.warps, options.stages)
    else:
        chosen = Blocks(*row_for(options.device, options.mask, head_dim, bits)[kernel])
    return dataclasses.replace(chosen, q=min(chosen.q, power_of_two(queries)), k=min(chosen.k, power_of_two(keys)))


def shared_bytes(kernel: str, blocks: Blocks, head_dim: int, bits: int) -> int:
    """Shared memory of a program: the tiles that stay, and `stages` of the two that its loop loads."""
    stay, loaded = (blocks.k, blocks.q) if kernel == "dkv" else (blocks.q, blocks.k)
    return ((1 if kernel == "forward" else 2) * stay + 2 * blocks.stages * loaded) * head_dim * bits // 8
