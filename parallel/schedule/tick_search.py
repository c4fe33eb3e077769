"""The best table for the tick machine, which is how the executor runs: every schedule, packed every way, and improved."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import product

from parallel.errors import UserError
from parallel.schedule.order import group_sizes, groups, in_turn
from parallel.schedule.search import Result, candidates, lower_bound
from parallel.schedule.table import ScheduleError, Table, check_sizes
from parallel.schedule.ticks import ORDERS, SHAPES, TickTable, pack

Costs = tuple[float, float, float]
WORK = 400_000  # actions packed by the local improvement, for effort 1
MANY = 20_000  # actions above which only the named schedules are packed


@dataclasses.dataclass(frozen=True)
class FoundTicks(Result):
    """Searched ticks."""

    ticks: TickTable


def packings(table: Table) -> list[TickTable]:
    """A table packed in both shapes and both orders."""
    return [pack(table, shape, order) for shape, order in product(SHAPES, ORDERS)]


def best_packing(table: Table, costs: Costs = (1, 1, 1), idle: str = "skip", memory: float = 0.0) -> TickTable | None:
    """The cheapest packing that holds at most `memory` microbatches a rank (0: any); None when none does."""
    fitting = [t for t in packings(table) if not memory or max(t.peak_activations) <= memory + 1e-6]
    return min(fitting, key=lambda t: (t.cost(*costs, idle=idle), max(t.peak_activations)), default=None)


def search_ticks(
    stages: int,
    microbatches: int,
    costs: Costs = (1.0, 1.0, 1.0),
    memory: float = 0.0,
    chunks: int = 0,
    idle: str = "skip",
    effort: float = 1.0,
    seed: int = 0,
) -> FoundTicks:
    """The ticks that cost least; never more than any named schedule that fits, in any packing.

    costs: times of F, B, W of one full rank. memory: microbatches of one full rank that a rank may hold while the ticks run (0:
    no limit). chunks: the most a rank may have (0: 2). idle: 'skip' or 'compute'. effort: of the local improvement. Packing the
    result's table again (order 'keep', its shape) gives the result's ticks.
    """
    p, m, most = stages, microbatches, chunks or 2
    check_sizes(p, m, most, memory=memory)
    tried: dict[str, float] = {}
    best: tuple[float, float, TickTable] | None = None
    seen: set[tuple] = set()
    for name, table in [*candidates(p, m, costs, 0.0, 0.0, most), *_family(p, m, most)]:
        if (table.placement, table.chunks, table.ranks) in seen:
            continue
        seen.add((table.placement, table.chunks, table.ranks))
        ticks = best_packing(table, costs, idle, memory)
        if ticks is None:
            continue
        score = (ticks.cost(*costs, idle=idle), max(ticks.peak_activations))
        if name:
            tried[name] = min(tried.get(name, score[0]), score[0])
        if best is None or score < best[:2]:
            best = (*score, ticks)
    if best is None:
        raise UserError(f"auto: no table for {p} stages and {m} microbatches holds at most {memory:g} microbatches a rank")
    bound = lower_bound(p, m, costs, 0.0, most, memory=memory)
    ticks = _as_table(best[2], costs, idle, memory)
    if effort > 0 and best[0] > bound * (1 + 1e-9):
        ticks = _improved(ticks, costs, idle, memory, int(effort * WORK / len(ticks.at)), random.Random(seed))
    return FoundTicks(ticks.cost(*costs, idle=idle), bound, tried, ticks)


def _family(p: int, m: int, most: int) -> Iterator[tuple[str, Table]]:
    """The 1F1B pattern on a loop with other warm-ups, groups and lags of W than the named ones."""
    for v in sorted({v for v in (1, 2, 3, 4, 6, 8, most) if v <= most}):
        if 3 * p * m * v > MANY:
            continue
        for g in sorted({-(-p // 2), p} if v > 1 else {p}):
            sizes = group_sizes(m, g, g)
            forward, backward = groups(sizes, v), groups(sizes, v, reverse=True)
            for steps, lag, extra in product((1, 2), (0, 1, 2), (0, 1, p // 2)):
                warmup = [steps * (p - 1 - r) + (v - 1) * sizes[0] + extra for r in range(p)]
                ranks = tuple(in_turn(forward, backward, warmup[r], lag * r) for r in range(p))
                try:
                    yield "", Table("auto", p, v, m, "loop" if v > 1 else "linear", ranks).validate()
                except ScheduleError:  # too small a group for these warm-ups
                    continue


def _as_table(ticks: TickTable, costs: Costs, idle: str, memory: float) -> TickTable:
    """The same ticks as a table of its own, whose kept order gives them (or better ones)."""
    table = dataclasses.replace(ticks.table, name="auto", pairs=(), ranks=tuple(map(tuple, ticks.unpack())))
    again = pack(table, ticks.shape)
    fits = not memory or max(again.peak_activations) <= memory + 1e-6
    if fits and again.cost(*costs, idle=idle) <= ticks.cost(*costs, idle=idle) + 1e-9:
        return again
    return dataclasses.replace(ticks, table=table)


def _improved(ticks: TickTable, costs: Costs, idle: str, memory: float, tries: int, rng: random.Random) -> TickTable:
    """Swap random neighbours of a rank's list, keep what is not worse."""
    if ticks.order != "keep":
        return ticks
    value, shape = ticks.cost(*costs, idle=idle), ticks.shape
    for _ in range(tries):
        r = rng.randrange(ticks.table.stages)
        row = list(ticks.table.ranks[r])
        i = rng.randrange(len(row) - 1) if len(row) > 1 else 0
        a, b = row[i : i + 2] if len(row) > 1 else (row[0], row[0])
        if a[1:] == b[1:] or (a.kind == b.kind and a.chunk == b.chunk):
            continue
        row[i : i + 2] = b, a
        table = dataclasses.replace(ticks.table, ranks=(*ticks.table.ranks[:r], tuple(row), *ticks.table.ranks[r + 1 :]))
        try:
            other = pack(table, shape)
        except ScheduleError:
            continue
        cost = other.cost(*costs, idle=idle)
        if cost <= value + 1e-12 and (not memory or max(other.peak_activations) <= memory + 1e-6):
            ticks, value = other, cost
    return ticks
