"""The pipeline's time and what it holds, from the very schedule tables, with unequal stages.

Two machines. *Asynchronous*: every rank runs its list and waits for what it needs: Megatron, DeepSpeed, torchtitan. *Ticks*:
all ranks in lockstep, as this repository's executor runs the same table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallel import schedule
from parallel.schedule.simulate import memory_peaks, simulate, tick_durations
from parallel.schedule.table import Table

Costs = tuple[float, float, float]


class Pipeline(NamedTuple):
    """seconds: of all microbatches. work: of the mean rank. busiest: of the rank with the most work. held: per rank,
    microbatches of a full rank that it holds at most. layers: per rank, its layers. With ticks also slots: places of each class
    of the executor's buffers on every rank, and chunk: layers of a chunk."""

    seconds: float
    work: float
    busiest: float
    held: tuple[float, ...]
    layers: tuple[int, ...]
    slots: Mapping[str, int] | None = None
    chunk: int = 0

    @property
    def bubble(self) -> float:
        """Share of the time in which the mean rank has nothing to do."""
        return max(0.0, 1 - self.work / self.seconds)


def spread_layers(layers: int, stages: int, ends: int = 0) -> list[int]:
    """Layers of every stage in model order, as even as possible; the first and last one get `ends` fewer."""
    if stages == 1:
        return [layers]
    whole, extra = divmod(layers + 2 * ends, stages)
    counts = [whole + (1 <= s <= extra) for s in range(stages)]  # the middle takes what does not divide
    if extra >= stages - 1:
        counts = [whole + (s < extra) for s in range(stages)]
    counts[0], counts[-1] = counts[0] - ends, counts[-1] - ends
    return counts


@dataclasses.dataclass(frozen=True)
class Machine:
    """How a table runs. blocking: seconds that a message holds up its sender and receiver; delay: those it only arrives
    later. ticks: in lockstep, as the executor, with embedding and head spread over the ranks; whole: W in its B's tick."""

    blocking: float = 0.0
    delay: float = 0.0
    ticks: bool = False
    whole: bool = False


def run(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    layers: int,
    layer: Costs,
    first: Costs = (0, 0, 0),
    last: Costs = (0, 0, 0),
    ends: int = 0,
    machine: Machine = Machine(),  # noqa: B008
) -> Pipeline:
    """Simulate a schedule.

    layer: seconds of F, B and W of one layer and one microbatch. first, last: of embedding and head on their stages. ends:
    layers that the first and last stage have fewer.
    """
    p, m, v = stages, microbatches, chunks
    counts = spread_layers(layers, p * v, ends)
    costs = np.outer(counts, np.asarray(layer, float))
    if p == 1 and not machine.ticks:
        each = float(costs.sum() + sum(first) + sum(last))
        return Pipeline(m * each, m * each, m * each, (1.0,), (layers,))
    vocabulary = 0.0
    if machine.ticks:
        vocabulary = (sum(first) + sum(last)) / p
    else:
        costs[0] += first
        costs[-1] += last
        costs[:, :2] += machine.blocking
    one = lambda m: _simulate(name, p, m, v, counts, costs, vocabulary, machine)
    short, step = 2 * p + m % p, p
    kept = machine.ticks and name != "interleaved"  # such orders may pack in longer rhythms
    if m <= short + p or kept or name.startswith("zb-"):  # and zero bubbles settle late
        return one(m)
    low, high = one(short), one(short + step)  # past the warm-up a table repeats: two short ones give the rest
    line = lambda a, b: a + (b - a) * (m - short) / step
    values = (line(low.seconds, high.seconds), line(low.work, high.work), line(low.busiest, high.busiest))
    return Pipeline(*values, *high[3:])


def quick(stages: int, microbatches: int, chunks: int, layers: int, layer: Costs, ends: Costs, whole: bool) -> Pipeline:
    """The executor's interleaved schedule in closed form, to rank layouts before their tables are made.

    Per unit of a full rank (F = B = W = 1) a step takes 3m + 2(p-1)/v, or 3m + 3(p-1)/v with whole backwards; rank 0 holds
    p + (p-1)/v microbatches, and p/v wait for their W.
    """
    p, m, v = stages, microbatches, chunks
    per_chunk = -(-layers // (p * v))
    rank = sum(layer) * per_chunk * v + sum(ends) / p
    held = min(float(m), p + (p - 1) / v)
    seconds = m * rank + (3 if whole else 2) * (p - 1) / v * rank / 3
    work = m * (sum(layer) * layers / p + sum(ends) / p)
    slots = dict(a=math.ceil(held * v), x=1, g=1)
    if not whole:
        slots |= dict(aw=slots["a"], cut=min(m, p))
    return Pipeline(seconds, work, m * rank, (held,) * p, (per_chunk * v,) * p, slots, per_chunk)


def _simulate(name, p, m, v, counts, costs, vocabulary, machine) -> Pipeline:
    key = (1, 1, 1)
    if name in ("zb-1p", "zb-2p"):  # their order is fitted to the times
        mean = costs.mean(0)
        key = tuple(round(float(c), 4) for c in mean / max(mean.max(), 1e-30))
    table = make(name, p, m, v, key, machine.ticks, machine.whole)
    layers, work = [0] * p, np.zeros(p)
    for s, (r, _) in enumerate(table.places):
        layers[r] += counts[s]
        work[r] += (costs[s].sum() + vocabulary / v) * m
    mean, most = float(work.mean()), float(work.max())
    if not machine.ticks:
        result = simulate(table, costs, machine.delay)
        free = name.startswith("zb-")  # its optimiser has no barrier: a rank's next step starts when its own last one is done
        seconds = result.rank_span if free else result.makespan
        held = memory_peaks(table, backward=0.0 if table.whole else -0.5)  # B frees half (arXiv 2401.10241, table 1)
        return Pipeline(seconds, mean, most, tuple(held), tuple(layers))
    packed = _packed(name, p, m, v, key, machine.whole)
    seconds = float(tick_durations(packed, costs, "compute", vocabulary).sum()) + packed.length * machine.delay
    held = (max(packed.peak_activations),) * p  # every rank allocates what the fullest one needs
    return Pipeline(seconds, mean, most, held, (max(counts) * v,) * p, packed.peaks(), max(counts))


@lru_cache(maxsize=512)
def make(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs = (1, 1, 1),
    ticks: bool = False,
    whole: bool = False,
) -> Table:
    """The table of a schedule in its published form; with ticks as the trainer makes it: W apart and deferred, or whole."""
    backward = ""
    if ticks:
        deferred = name in ("1f1b", "interleaved", "eager-1f1b", "looped-bfs")
        backward = "whole" if whole else "split" if deferred else ""
    asked = chunks if schedule.SCHEDULES[name].free_chunks else 0
    return schedule.make(name, stages, microbatches, asked, backward=backward, costs=costs)


@lru_cache(maxsize=256)
def _packed(name, p, m, v, costs, whole):
    table = make(name, p, m, v, costs, True, whole)
    packed = [schedule.pack(table, shape) for shape in ("pairs", "single")]
    return min(packed, key=lambda ticks: ticks.cost(6, 12, 4, idle="compute"))
