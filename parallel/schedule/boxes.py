"""What a picture of a schedule shows, as plain data: who does what from when to when. Drawn by draw.py, html.py and
trace.py.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from parallel.errors import UserError
from parallel.schedule.simulate import Simulation
from parallel.schedule.table import Table
from parallel.schedule.ticks import SLOTS, TickTable

# Blue, orange, pale green: apart for the colour-blind, and dark, middle, light in grey. Per kind: first and last chunk.
COLOURS = {
    "F": ((64, 112, 172), (16, 52, 104)),
    "B": ((244, 170, 72), (214, 128, 24)),
    "W": ((224, 243, 216), (182, 222, 172)),
}
WORDS = {"F": "forward", "B": "input gradient", "W": "weight gradient"}


class Box(NamedTuple):
    """`kind` F, B or W of a chunk for a microbatch on `rank`, from `start` to `end`. A BW is a B box and a W box in a
    row.
    """

    rank: int
    start: float
    end: float
    kind: str
    chunk: int
    microbatch: int
    stage: int


@dataclasses.dataclass(frozen=True)
class Picture:
    """Boxes to scale, with `lines` where ticks begin (empty for the asynchronous machine), up to time `end`."""

    table: Table
    boxes: list[Box]
    end: float
    lines: list[float]
    note: str

    @property
    def unit(self) -> float:
        """The median length of a box that takes any time."""
        lengths = [b.end - b.start for b in self.boxes if b.end > b.start]
        return float(np.median(lengths)) if lengths else 1.0

    @property
    def idle(self) -> float:
        """The part of all ranks' time in which nothing runs."""
        return 1 - sum(b.end - b.start for b in self.boxes) / (self.end * self.table.stages)

    def scaled(self, factor: float) -> Picture:
        """The same with all times multiplied."""
        boxes = [b._replace(start=b.start * factor, end=b.end * factor) for b in self.boxes]
        return dataclasses.replace(self, boxes=boxes, end=self.end * factor, lines=[t * factor for t in self.lines])


def colour(kind: str, chunk: int, chunks: int) -> str:
    """#rrggbb of a kind, darker for later chunks."""
    first, last = (np.array(c, float) for c in COLOURS[kind])
    mix = chunk / (chunks - 1) if chunks > 1 else 0.35
    return "#" + "".join(f"{round(x):02x}" for x in first + (last - first) * mix)


def of_simulation(simulation: Simulation) -> Picture:
    """The asynchronous machine's picture."""
    table, boxes = simulation.table, []
    for r, (rank, times) in enumerate(zip(table.ranks, simulation.times)):
        for (kind, chunk, m), (start, end) in zip(rank, times):
            s = table.stage_grid[r][chunk]
            if kind == "BW":
                both = simulation.costs[s, 1:]
                middle = start + (end - start) * (both[0] / both.sum() if both.sum() else 0.5)
                boxes += [Box(r, start, middle, "B", chunk, m, s), Box(r, middle, end, "W", chunk, m, s)]
            else:
                boxes.append(Box(r, start, end, kind, chunk, m, s))
    return Picture(table, boxes, simulation.makespan, [], "asynchronous")


def of_ticks(ticks: TickTable, costs=(1, 1, 1), idle: str = "skip", durations=None) -> Picture:
    """The tick machine's picture. costs: F, B, W of one full rank.

    idle='skip': a rank packs its own slots, a tick lasts as long as its busiest rank. 'compute': every rank has all
    slots that the tick's phase holds, and an idle one is white. durations: [ticks] measured seconds, to draw instead of
    the costs' ticks.
    """
    if idle not in ("skip", "compute"):
        raise UserError(f"idle is 'skip' or 'compute', not {idle!r}")
    table, unit = ticks.table, np.asarray(costs, float) * ticks.table.share
    slots = np.zeros((ticks.length, 3), bool)
    for start, stop, held in ticks.phases(costs=tuple(costs)):
        slots[start:stop] = held
    width = (ticks.busy @ unit).max(1) if idle == "skip" else slots @ unit
    stretch = np.ones(ticks.length)
    if durations is not None:
        durations = np.asarray(durations, float)
        if durations.shape != (ticks.length,):
            raise UserError(f"{table.name}: {ticks.length} ticks need {ticks.length} durations, not {durations.size}")
        stretch = np.divide(durations, width, out=np.ones(ticks.length), where=width > 0)
        width = width * stretch
    begin = np.concatenate([[0.0], np.cumsum(width)])
    boxes = []
    for (kind, s, m), t in ticks.at.items():
        (r, c), k = table.places[s], SLOTS.index(kind)
        there = ticks.busy[t, r] if idle == "skip" else slots[t]
        start = begin[t] + stretch[t] * float(unit[:k] @ there[:k])
        boxes.append(Box(r, start, start + stretch[t] * unit[k], kind, c, m, s))
    return Picture(
        table,
        boxes,
        float(begin[-1]),
        begin[:-1].tolist(),
        f"{ticks.length} ticks in {ticks.shape}, idle slots: {idle}",
    )
