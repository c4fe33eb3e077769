"""Interleaved schedules: several chunks a rank, placed round and round (loop), microbatches in groups."""

from __future__ import annotations

from parallel.errors import UserError
from parallel.schedule.order import group_sizes, groups, in_turn
from parallel.schedule.table import Table


def interleaved(stages: int, microbatches: int, chunks: int = 2, group: int = 0, split: bool = False) -> Table:
    """Interleaved 1F1B. Narayanan et al. 2021, arXiv 2104.04473; group size as N in Llama 3, arXiv 2407.21783.

    A group of microbatches (default p, at least p: a smaller one would come back to rank 0 before it can go on) runs
    chunk by chunk; 2(p-1-r) + (v-1)g forwards come before the first backward: the peak is (2(p-1-r) + (v-1)g + 1) / v.
    Microbatches that would leave a last group of fewer than p are spread over the other groups. With fewer than p, all
    are one group. W, when split off, lags by the rank: that raises no rank above rank 0.
    """
    p, m, v, g = stages, microbatches, chunks, group or stages
    if g < p:
        raise UserError(f"interleaved: a group of {g} microbatches is smaller than the {p} stages; use a group of {p} or more")
    sizes = group_sizes(m, g, p)
    forward, backward = groups(sizes, v), groups(sizes, v, reverse=True)
    ranks = tuple(in_turn(forward, backward, 2 * (p - 1 - r) + (v - 1) * sizes[0], r if split else None) for r in range(p))
    return Table("interleaved", p, v, m, "loop", ranks)


def looped_bfs(stages: int, microbatches: int, chunks: int = 2, split: bool = False) -> Table:
    """Breadth first: all forwards chunk by chunk, then all backwards. Lamy-Poirier 2022, arXiv 2211.05953. Peak: m.

    Each chunk's weights are used in two runs only.
    """
    forward, backward = groups([microbatches], chunks), groups([microbatches], chunks, reverse=True)
    ranks = tuple(in_turn(forward, backward, len(forward), r if split else None) for r in range(stages))
    return Table("looped-bfs", stages, chunks, microbatches, "loop", ranks)


def gis(stages: int, microbatches: int, chunks: int = 2, group: int = 0) -> Table:
    """Interleaved with a split backward: (v-1)g + (p-1-r) forwards first, W lags by the rank. PipeOffload, arXiv
    2503.01328.

    Peak p microbatches on every rank; with W in the gaps the bubble is (p-1)(F+B-W)/v. PyTorch's InterleavedZeroBubble.
    """
    g = group or stages
    if g < stages:
        raise UserError(f"gis: a group of {g} microbatches is smaller than the {stages} stages; gis-h has smaller groups")
    return _gis("gis", stages, microbatches, chunks, g)


def gis_h(stages: int, microbatches: int, chunks: int = 2, group: int = 0) -> Table:
    """GIS with groups of half the stages: peak (v+1)/(2v) p, for some bubble more. PipeOffload, arXiv 2503.01328."""
    half = -(-stages // 2)
    g = group or half
    if not half <= g <= stages:
        raise UserError(f"gis-h: the group is between half of the {stages} stages ({half}) and all, not {g}")
    return _gis("gis-h", stages, microbatches, chunks, g)


def _gis(name: str, p: int, m: int, v: int, g: int) -> Table:
    sizes = group_sizes(m, g, g)
    forward, backward = groups(sizes, v), groups(sizes, v, reverse=True)
    ranks = tuple(in_turn(forward, backward, (v - 1) * sizes[0] + p - 1 - r, r) for r in range(p))
    return Table(name, p, v, m, "loop", ranks)
