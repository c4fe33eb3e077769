"""The best table for given costs, delay and memory: every schedule that fits, re-fitted and improved by local search."""

from __future__ import annotations

import dataclasses

from parallel.errors import UserError
from parallel.schedule.interleaved import gis_h
from parallel.schedule.local import improve
from parallel.schedule.order import in_turn
from parallel.schedule.refit import place_w
from parallel.schedule.simulate import memory_peaks, simulate, stage_costs
from parallel.schedule.table import Table, check_sizes

Costs = tuple[float, float, float]
OBJECTIVES = ("makespan", "rank_span")
WORK = 3_000_000  # actions timed in local search, for effort 1: seconds
STARTS = 4  # tables that local search starts from


@dataclasses.dataclass(frozen=True)
class Result:
    """What a search is worth: its value in the unit of the costs, the bound that nothing goes below, and what the named
    schedules that fit give without search, {name: value}.
    """

    value: float
    bound: float
    tried: dict[str, float]

    @property
    def gap(self) -> float:
        """How far it may be from the best: (value - bound) / bound."""
        return self.value / self.bound - 1


@dataclasses.dataclass(frozen=True)
class Found(Result):
    """A searched table."""

    table: Table


def lower_bound(
    stages: int,
    microbatches: int,
    costs: Costs,
    comm: float = 0.0,
    chunks: int = 1,
    objective: str = "makespan",
    memory: float = 0.0,
) -> float:
    """No linear, loop or V table with up to `chunks` chunks a rank takes less, on either machine (ticks: comm 0).

    A rank works m(F+B+W). Makespan: the last rank to start waits for p-1 forwards of a chunk and p-1 hops before that;
    and one microbatch alone takes p forwards and backwards and its last W. memory: microbatches that a rank may hold (0: any);
    each is held by rank 0 while it runs to the last stage and back, and memory times the rank's span has room for all m.
    """
    (F, B, W), p = costs, stages
    bound = microbatches * (F + B + W)
    if memory:
        held = [(p * (F + B) * (v + 1) / 2 + W) / v + comm * (p * (v + 1) - 2) for v in range(1, chunks + 1)]  # loops
        held += [(2 * p + 1) * (F + B) / 4 + W / 2 + comm * 2 * (p - 1)] if chunks > 1 else []  # a V
        bound = max(bound, microbatches * min(held) / memory)
    if objective == "rank_span":
        return bound
    work = microbatches * (F + B + W)
    wait = (p - 1) * (F / chunks + comm)
    return max(bound, work + wait, p * (F + B) + W / chunks + 2 * (p - 1) * comm)


def search(
    stages: int,
    microbatches: int,
    costs: Costs = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory: float = 0.0,
    chunks: int = 0,
    objective: str = "makespan",
    effort: float = 1.0,
    seed: int = 0,
) -> Found:
    """The best table that is found; never worse than any named schedule that fits.

    costs: times of F, B, W of one full rank and one microbatch. comm: delay between ranks. memory: microbatches of one
    full rank that a rank may hold (0: no limit). chunks: the most a rank may have (0: 2). objective: makespan or
    rank_span. effort: work of the local search, 0 for none; the result depends on it and on `seed`, not on the machine.
    Raises UserError for impossible sizes.
    """
    if objective not in OBJECTIVES:
        raise UserError(f"the search minimises one of {', '.join(OBJECTIVES)}, not {objective!r}")
    p, m, most = stages, microbatches, chunks or 2
    check_sizes(p, m, most, memory=memory)
    value = lambda table: getattr(simulate(table, costs, comm), objective)
    tables = candidates(p, m, costs, comm, memory, most)
    tried: dict[str, float] = {}
    scored: list[tuple[float, Table]] = []
    for name, table in tables:
        scored.append((value(table), table))
        tried[name] = min(tried.get(name, scored[-1][0]), scored[-1][0])
    scored.sort(key=lambda s: s[0])
    room = lambda table: int((memory or m) * table.chunks + 1e-6)
    for _, table in scored[: 2 * STARTS]:
        for patience in (0.25, 0.5, 1.0):
            other = place_w(table, stage_costs(table, costs), comm, room(table), patience)
            if other is not None and _fits(other, memory):
                scored.append((value(other), other))
    scored.sort(key=lambda s: s[0])
    bound = lower_bound(p, m, costs, comm, most, objective, memory)
    best, table = scored[0]
    starts: list[tuple[float, Table]] = []
    for s in scored:  # one of every value: the same value means much the same table
        if not starts or s[0] > starts[-1][0] * (1 + 1e-9):
            starts.append(s)
    race = starts[:STARTS]
    for rounds, share in enumerate((0.3, 0.3, 0.4)):  # all starts, the better half, the best
        for i, (_, start) in enumerate(race):
            if effort <= 0 or race[0][0] <= bound * (1 + 1e-9):
                break
            split = start.split_backward()
            actions = 3 * m * p * start.chunks
            steps = max(int(effort * share * WORK / len(race) / actions), 20)
            spans = objective == "rank_span"
            race[i] = improve(split, stage_costs(split, costs), comm, room(split), spans, steps, seed + rounds)
        race.sort(key=lambda s: s[0])
        race = race[: max(1, len(race) // 2)]
    if race[0][0] < best:
        best, table = race[0]
    return Found(best, bound, tried, dataclasses.replace(table, name="auto", pairs=()))


def candidates(p: int, m: int, costs: Costs, comm: float, memory: float, chunks: int) -> list[tuple[str, Table]]:
    """(name, table) of every executable schedule and of some variants, with at most `chunks` chunks, that fit the
    memory.
    """
    from parallel.schedule.registry import SCHEDULES, make

    out: list[tuple[str, Table]] = []

    def offer(name: str, build) -> None:
        try:
            table = build()
        except UserError:  # its rule does not allow it
            return
        if _fits(table, memory):
            out.append((name, table))

    for name, spec in SCHEDULES.items():
        if not spec.executable or name == "auto":
            continue
        counts = sorted({v for v in (1, 2, 3, 4, 6, 8, chunks) if v <= chunks}) if spec.free_chunks else [spec.chunks]
        for v in counts:
            if v > chunks:
                continue
            for backward in ("",) if spec.split else ("whole", "split"):
                ask = {"backward": backward, "costs": costs, "comm": comm, "memory": memory if spec.timed else 0.0}
                offer(name, lambda n=name, v=v, a=ask, f=spec.free_chunks: make(n, p, m, v if f else 0, **a))
            if name == "gis-h":
                for g in range(-(-p // 2) + 1, p):
                    offer(name, lambda v=v, g=g: gis_h(p, m, v, g))
    held = int(memory) if memory else p
    for n in sorted({1, 2, held - 1, held} & set(range(1, p + 1))):  # 1F1B with fewer in flight: fits any memory
        units = [(0, i) for i in range(m)]
        ranks = tuple(in_turn(units, units, min(p - 1 - r, n - 1), 0) for r in range(p))
        offer("1f1b, fewer in flight", lambda ranks=ranks: Table("1f1b", p, 1, m, "linear", ranks))
    return out


def _fits(table: Table, memory: float) -> bool:
    return not memory or max(memory_peaks(table)) <= memory + 1e-6
