"""How long one GPU takes for a matmul, attention and memory-bound work, from shapes: ceiling, waves, depth, roofline."""

from __future__ import annotations

import math
from functools import lru_cache

from parallel.cluster import Gpu

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 64, 0.62))
"""(rows, columns, share of the ceiling) of the output tiles that cuBLAS and CUTLASS choose between."""
DEPTH = 160
"""A matmul of depth K reaches K / (K + DEPTH) of its rate: filling and draining the pipeline of a tile."""
BYTES = dict(bf16=2.0, fp8=1.0, fp4=0.5)
ATTENTION = dict(A=(0.70, 0.70), H=(0.78, 0.42), B=(0.80, 0.25))
"""Share of the matmul ceiling that flash attention's forward reaches by GPU generation: newest kernel (cuDNN; FlashAttention-3,
arXiv 2407.08608: 640 TFLOP/s causal on H100; FlashAttention-4 on B200), FlashAttention-2 (A100 180 of 256 TFLOP/s, H100 328 of
791; Azure guide)."""
ODD = 0.10
"""Share of the rate that is left when rows of 16-bit numbers are no multiple of 16 bytes (NVIDIA's matmul guide)."""


@lru_cache(maxsize=100_000)
def filling(m: int, n: int, sms: int) -> float:
    """The share of the machine that the best tiling of an m x n output uses: partly filled tiles and the last wave."""
    best = 0.0
    for rows, columns, share in TILES:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / sms)
        best = max(best, share * m * n / (waves * sms * rows * columns))
    return best


def matmul(m: float, n: float, k: float, gpu: Gpu, precision: str, speed: float = 1.0) -> float:
    """Seconds of an m x k by k x n matmul. speed: multiplies the rate (what a framework reaches of the ceiling)."""
    m, n, k = max(1, round(m)), max(1, round(n)), max(1, round(k))
    share = filling(m, n, gpu.sms) * k / (k + DEPTH)
    if min(n, k) % 64:  # off the grid of tiles and memory sectors
        share *= 0.92
    size = BYTES[precision]
    moved = size * (m * k + k * n) + 2 * m * n
    return max(2 * m * n * k / (gpu.rate(precision) * share * speed), memory(moved, gpu))


def memory(bytes_moved: float, gpu: Gpu, speed: float = 1.0) -> float:
    """Seconds of moving so many bytes through a GPU's memory."""
    return bytes_moved / (gpu.hbm_tbs * 1e12 * gpu.hbm_share * speed)


def attention(rows: float, length: float, keys: float, heads: float, dim: int, gpu: Gpu, flash: int, causal: bool) -> float:
    """Seconds of the forward of attention for `rows` sequences with `length` queries and `keys` keys each.

    flash: nothing of size queries x keys is written (2: by FlashAttention-2, 3: by a newer kernel); causal: it skips the
    masked half. Without flash two batched matmuls over all pairs, a softmax with its mask and a
    dropout: 13 bytes a pair (Megatron's fused softmax).
    """
    pairs = rows * heads * length * keys
    rate = gpu.rate("bf16")
    if flash:
        generation = "A" if gpu.sms == 108 or "fp8" not in gpu.peak else "B" if "fp4" in gpu.peak else "H"
        share = ATTENTION[generation][flash == 2] * length / (length + 256) * min(1.0, (dim + 64) / 192)
        return 4 * dim * pairs * (0.5 if causal else 1.0) / (rate * share)
    share = 0.7 * dim / (dim + 64) * (1.0 if dim % 8 == 0 else ODD)
    return 4 * dim * pairs / (rate * share) + memory(13 * pairs, gpu)
