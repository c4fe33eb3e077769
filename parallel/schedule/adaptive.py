"""The building block that suits a memory limit and the costs best. Qi et al. 2024, arXiv 2405.15362, section 4.3
(adaptive).
"""

from __future__ import annotations

from itertools import product

import numpy as np

from parallel.errors import UserError
from parallel.schedule.building_block import PERIOD, Block, from_block, v_half_block, v_min_block
from parallel.schedule.simulate import memory_peaks, simulate
from parallel.schedule.table import Table

Costs = tuple[float, float, float]


def adaptive_v(
    stages: int,
    microbatches: int,
    costs: Costs = (1, 1, 1),
    comm: float = 0.0,
    memory: float = 0.0,
    span: bool = False,
) -> Table:
    """The V schedule with the shortest makespan (span: the shortest longest rank span) within `memory` microbatches a
    rank.

    memory: 0 for p, as much as 1F1B. Raises UserError when V-Min does not fit either.
    """
    p, m = stages, microbatches
    limit = memory or p
    few = min(m, 2 * p + 4)  # enough to tell warm-up, rhythm and cool-down apart
    value = lambda table: getattr(simulate(table, costs, comm), "rank_span" if span else "makespan")
    best: tuple[float, Block] | None = None
    for block in [v_half_block(p), *_blocks(p, limit), v_min_block(p)]:
        table = from_block("adaptive-v", block, few)
        if max(memory_peaks(table)) <= limit + 1e-9:
            best = min(best or (np.inf, block), (value(table), block), key=lambda b: b[0])
    while best is not None:
        table = from_block("adaptive-v", best[1], m)
        if max(memory_peaks(table)) <= limit + 1e-9:
            return table
        best = (0.0, v_min_block(p)) if best[1] != v_min_block(p) else None
    check_memory(p, m, limit)
    raise UserError(f"adaptive-v: no building block holds {m} microbatches within {limit:g} a rank; allow one more")


def check_memory(stages: int, microbatches: int, memory: float) -> None:
    """Raise UserError when V-Min holds more than `memory` microbatches a rank (0: no limit)."""
    few = min(microbatches, 2 * stages + 4)  # from there on it holds no more
    least = max(memory_peaks(from_block("v-min", v_min_block(stages), few)))
    if 0 < memory < least - 1e-9:
        raise UserError(f"adaptive-v: {memory:g} microbatches a rank are too few; {stages} stages need {least:g} at least")


def _blocks(p: int, limit: float) -> list[Block]:
    """Blocks without collisions, those that fill the limit first.

    F0 and B1 go down the ranks in steps of k slots, F1 and B0 come up one slot a rank; k changes once, at any rank; the
    gaps at the two turns and before B1 are free.
    """
    ranks = np.arange(p)
    found: dict[tuple[int, ...], tuple[float, Block]] = {}
    for k, k2, switch in product(range(1, PERIOD), range(1, PERIOD), range(1, max(p, 2))):
        if k == k2 and switch > 1:
            continue
        down = np.concatenate([[0], np.cumsum(np.where(ranks[:-1] < switch, k, k2))])
        up = p - 1 - ranks
        gaps = np.stack(np.meshgrid(*[np.arange(PERIOD)] * 3, indexing="ij"), -1).reshape(-1, 3, 1)
        f0 = np.broadcast_to(down, (len(gaps), p))
        f1 = f0[:, -1:] + 1 + gaps[:, 0] + up
        b1 = f1[:, :1] + 1 + gaps[:, 1] + down
        b0 = b1[:, -1:] + 1 + gaps[:, 2] + up
        times = np.stack([f0, f1, b1, b0], -1)  # [gaps, rank, kind]
        phases = np.sort(times % PERIOD, -1)
        times = times[(np.diff(phases, axis=-1) > 0).all((1, 2))]
        peaks = _steady_peak(times).max(1) / 2
        for i in np.flatnonzero(peaks <= limit):
            block = [tuple(int(t) for t in row) for row in times[i]]
            found.setdefault(tuple(block[0] + block[-1]), (-peaks[i], block))
    chosen = [block for _, block in sorted(found.values(), key=lambda f: (f[0], f[1][0][3]))]
    half = 12 if p <= 8 else max(2, 96 // p)  # blocks that are built and timed; the larger, the slower
    most = chosen[: 40 * half]  # the fullest, of them the shortest and a sample of the others
    return most[:half] + most[half::39]


def _steady_peak(times: np.ndarray) -> np.ndarray:
    """Chunk activations that each rank holds at most, once all slots repeat. times: [blocks, rank, kind]."""
    f0, f1, b1, b0 = np.moveaxis(times, -1, 0)
    waiting, peak = np.zeros_like(f0), np.zeros_like(f0)
    for t in range(2 * PERIOD):  # the second period is the steady one
        taken = ((t - times) % PERIOD == 0).any(-1)
        waiting -= (~taken & (waiting > 0)).astype(waiting.dtype)
        begun = (t - f0) // PERIOD + (t - f1) // PERIOD - (t - b1) // PERIOD - (t - b0) // PERIOD
        waiting += ((t - b1) % PERIOD == 0).astype(waiting.dtype) + ((t - b0) % PERIOD == 0)
        peak = np.maximum(peak, begun + waiting) if t >= PERIOD else peak
    return peak
