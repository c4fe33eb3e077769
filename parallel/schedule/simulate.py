"""A table in time on the asynchronous machine: every rank runs its list in order and waits for what it needs.

An action starts when its rank is free and its input has come: `comm` after the producer's end when that is another
rank. Sends never block. This one rule reproduces the bubble rates that Zero Bubble (arXiv 2401.10241, Table 5)
calculated from measured times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from parallel.errors import UserError
from parallel.schedule.table import Table
from parallel.schedule.ticks import TickTable

Costs = tuple[float, float, float]


def stage_costs(
    table: Table,
    costs: Costs = (1, 1, 1),
    layers: Sequence[float] | None = None,
    vocabulary: Costs | None = None,
    spread: bool = True,
) -> np.ndarray:
    """[stages, 3]: times of F, B, W of every global stage for one microbatch.

    costs: times of one full rank (B is the input gradient only). layers: relative size of every stage, all equal by
    default; their sum stands for p full ranks. vocabulary: times of the output layer on one rank; spread=True divides
    it over the ranks (added to each rank's last chunk, without the wait for one another), False leaves it with the last
    stage.
    """
    size = np.ones(len(table.places)) if layers is None else np.asarray(layers, float)
    if len(size) != len(table.places) or (size < 0).any() or not size.sum():
        raise UserError(f"{table.name}: give {len(table.places)} sizes of stages, at least 0 and not all 0")
    times = np.outer(size * len(size) / size.sum() * table.share, np.asarray(costs, float))
    if vocabulary is not None:
        extra = np.asarray(vocabulary, float)
        if spread:
            times[-table.stages :] += extra / table.stages
        else:
            times[[s for s in range(len(size)) if table.after(s) < 0]] += extra
    return times


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Start and end of every action, `times[rank][position]`, and what follows from them. Times have the unit of the
    costs.
    """

    table: Table
    costs: np.ndarray
    comm: float
    times: list[list[tuple[float, float]]]

    @cached_property
    def makespan(self) -> float:
        """From the start of the step to the last end on any rank: what a step with one global norm pays."""
        return max(rank[-1][1] for rank in self.times if rank)

    @cached_property
    def rank_span(self) -> float:
        """The longest time from a rank's first start to its last end: what a step without any barrier pays."""
        return max(rank[-1][1] - rank[0][0] for rank in self.times if rank)

    @cached_property
    def ideal(self) -> float:
        """The work of the mean rank: m(F+B+W)."""
        kinds = 1 if self.table.forward_only else 3
        return float(self.costs[:, :kinds].sum() * self.table.microbatches / self.table.copies / self.table.stages)

    @property
    def bubble_makespan(self) -> float:
        """(makespan - ideal) / makespan."""
        return 1 - self.ideal / self.makespan

    @property
    def bubble_rank_span(self) -> float:
        """(rank span - ideal) / rank span."""
        return 1 - self.ideal / self.rank_span

    @property
    def peak_activations(self) -> list[float]:
        """Per rank, in microbatches of one full rank, counted from F until its W or BW ends."""
        return memory_peaks(self.table)

    @property
    def residual_peak(self) -> list[float]:
        """Per rank, in microbatches of one full rank: what B hands to W, from B until its W ends."""
        return memory_peaks(self.table, forward=0, backward=1)

    @property
    def messages_per_rank(self) -> list[int]:
        """Activations and gradients that each rank sends to another rank in one step."""
        table, sent = self.table, []
        for r, rank in enumerate(table.ranks):
            ways = []
            for s in table.stage_grid[r]:
                there = {"F": table.after(s), "B": table.before(s)}
                ways.append({k: to >= 0 and table.places[to][0] != r for k, to in there.items()})
            sent.append(sum(ways[a.chunk].get(a.kind[0], False) for a in rank))
        return sent


def simulate(
    table: Table,
    costs: Costs | np.ndarray = (1, 1, 1),
    comm: float = 0.0,
    pair: float | None = None,
) -> Simulation:
    """Run a table on the asynchronous machine.

    costs: (F, B, W) of one full rank and one microbatch, or [stages, 3] from `stage_costs`. comm: delay of an edge
    between two ranks. pair: time of a whole F&B pair of one chunk, which then runs as one block and hands on both
    results at its end; None runs the two actions one after the other.
    """
    times = np.asarray(costs, float)
    if times.ndim == 1:
        times = stage_costs(table, tuple(costs))
    if times.shape != (len(table.places), 3) or (times < 0).any() or comm < 0:
        raise UserError(f"{table.name}: costs are three times F,B,W of at least 0, and comm is at least 0")
    length = {"F": times[:, 0].tolist(), "B": times[:, 1].tolist(), "W": times[:, 2].tolist()}
    length["BW"] = (times[:, 1] + times[:, 2]).tolist()
    if pair is not None and any(table.pairs):
        return Simulation(table, times, comm, _in_blocks(table, length, comm, pair))
    grid, places = table.stage_grid, table.places
    out: list[list[tuple[float, float]]] = [[] for _ in table.ranks]
    free = [0.0] * table.stages
    ends: dict[tuple[str, int, int], float] = {}
    for r, _, (kind, chunk, m), need in table.in_order():
        s, start = grid[r][chunk], free[r]
        if need is not None:
            there = ends[need] + (comm if places[need[1]][0] != r else 0.0)
            if there > start:
                start = there
        end = start + length[kind][s]
        free[r] = ends["B" if kind == "BW" else kind, s, m] = end
        out[r].append((start, end))
    return Simulation(table, times, comm, out)


def _in_blocks(table: Table, length, comm: float, pair: float) -> list[list[tuple[float, float]]]:
    """As `simulate`, with pairs as blocks. The two actions of a pair run in list order, but end together."""
    out: list[list[tuple[float, float]]] = [[] for _ in table.ranks]
    ends: dict[tuple[str, int, int], float] = {}
    position = [0] * table.stages
    moved = True
    while moved:
        moved = False
        for r, rank in enumerate(table.ranks):
            while position[r] < len(rank):
                i = position[r]
                n = 2 if i in table.pairs[r] else 1
                needs = [table.waits_for(r, a) for a in rank[i : i + n]]
                if any(need is not None and need not in ends for need in needs):
                    break
                lag = [ends[x] + comm * (table.places[x[1]][0] != r) for x in needs if x is not None]
                start = max([out[r][-1][1] if out[r] else 0.0, *lag])
                end = start + (pair if n == 2 else length[rank[i].kind][table.stage_grid[r][rank[i].chunk]])
                for kind, chunk, m in rank[i : i + n]:
                    ends["B" if kind == "BW" else kind, table.stage_grid[r][chunk], m] = end
                    out[r].append((start, end))
                position[r] += n
                moved = True
    if any(position[r] < len(rank) for r, rank in enumerate(table.ranks)):
        raise UserError(f"{table.name}: with pairs as blocks the ranks wait for each other")
    return out


def memory_peaks(table: Table, forward: float = 1, backward: float = 0, weight: float | None = None) -> list[float]:
    """Per rank, the largest sum of what is held, in units of one microbatch on one full rank.

    forward: what F adds. backward: what B adds (negative: frees). weight: what W frees at its end, by default all that
    is left. A BW frees everything. The order alone decides: a rank's memory changes with its own actions only.
    """
    left = forward + backward if weight is None else weight
    change = {"F": forward, "B": backward, "W": -left, "BW": -forward}
    peaks = []
    for rank in table.ranks:
        now = peak = 0.0
        for a in rank:
            now += change[a.kind]
            peak = max(peak, now)
        peaks.append(peak * table.share)
    return peaks


def tick_durations(
    ticks: TickTable, costs: Costs | np.ndarray = (1, 1, 1), idle: str = "skip", vocabulary: float = 0.0
) -> np.ndarray:
    """[ticks]: how long each tick of the executor takes; their sum is the step.

    costs: (F, B, W) of one full rank, or [stages, 3] from `stage_costs` for chunks that differ. idle='skip': a tick lasts as
    long as the largest sum of own slots. 'compute': as all slots that its phase holds, each as long as the largest stage's.
    vocabulary: time of one microbatch's joint vocabulary work on a rank, paid by all ranks in the tick in which it leaves the
    last stage.
    """
    table = ticks.table
    times = np.asarray(costs, float)
    if times.ndim == 1:
        times = stage_costs(table, tuple(costs))
    out = np.zeros(ticks.length)
    if idle == "skip":
        own = np.zeros((ticks.length, table.stages))
        for (kind, s, _), t in ticks.at.items():
            own[t, table.places[s][0]] += times[s, "FBW".index(kind)]
        out += own.max(1)
    elif idle == "compute":
        slots = times.max(0)
        for start, stop, held in ticks.phases(costs=tuple(slots)):
            out[start:stop] = slots @ np.array(held)
    else:
        raise UserError(f"idle is 'skip' or 'compute', not {idle!r}")
    for (kind, s, _), t in ticks.at.items():
        if kind == "F" and table.after(s) < 0:
            out[t] += vocabulary
    return out
