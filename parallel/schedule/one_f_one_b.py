"""Schedules with one chunk a rank and the backward in one piece: GPipe, 1F1B, eager 1F1B. With W deferred as well.

In every one, W lags B by the rank's number: B reaches rank r after p-1-r hops, so all ranks start on W together, and no
rank holds more than the one that holds most anyway.
"""

from __future__ import annotations

from parallel.schedule.order import in_turn
from parallel.schedule.table import Action, Table


def _table(name: str, p: int, m: int, split: bool, warmup) -> Table:
    units = [(0, i) for i in range(m)]
    ranks = tuple(in_turn(units, units, warmup(r), r if split else None) for r in range(p))
    return Table(name, p, 1, m, "linear", ranks)


def gpipe(stages: int, microbatches: int, split: bool = False) -> Table:
    """All forwards, then all backwards. Huang et al. 2019, arXiv 1811.06965. Peak: m microbatches on every rank."""
    return _table("gpipe", stages, microbatches, split, lambda r: microbatches)


def one_f_one_b(stages: int, microbatches: int, split: bool = False) -> Table:
    """p-1-r forwards, then one forward, one backward. PipeDream-flush, arXiv 2006.09503. Peak: min(p-r, m) on rank r.

    With W split off and lagging by the rank this is ZB-H1.
    """
    return _table("1f1b", stages, microbatches, split, lambda r: stages - 1 - r)


def eager_one_f_one_b(stages: int, microbatches: int, split: bool = False) -> Table:
    """2(p-1-r) forwards first, so that a forward hop has a whole action of slack. Alpa, arXiv 2211.05322. Peak:
    2(p-r)-1.
    """
    return _table("eager-1f1b", stages, microbatches, split, lambda r: 2 * (stages - 1 - r))


def forward(stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Forwards alone, one chunk a rank."""
    return tuple(tuple(Action("F", 0, i) for i in range(microbatches)) for _ in range(stages))
