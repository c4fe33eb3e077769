"""Hanayo and Chimera: schedules that are simulated and drawn, not executed.

Hanayo lays the model over the ranks in waves, there and back. Chimera runs two copies of the model in opposite
directions.
"""

from __future__ import annotations

import heapq

from parallel.errors import UserError
from parallel.schedule.table import Action, Table


def hanayo(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Waves, two chunks for each. Liu et al. 2023, arXiv 2308.15762. At most p microbatches in flight.

    Ordered by list scheduling at F=1, BW=2: a free rank takes what is ready, backward first, then the stage that is
    farthest along, then the oldest microbatch.
    """
    p, v, m = stages, chunks, microbatches
    if v % 2:
        raise UserError(f"hanayo: has two chunks for each wave, so an even number, not {v}")
    places = Table("hanayo", p, v, m, "wave", ()).places
    rows: list[list[Action]] = [[] for _ in range(p)]
    ready: list[list[tuple[int, int, int, float]]] = [[] for _ in range(p)]  # (is F, -stage, microbatch, since when)
    free, clock = [0.0] * p, [(0.0, r) for r in range(p)]
    entered = left = 0
    while left < m:
        now, r = heapq.heappop(clock)
        if free[r] > now:
            continue
        if r == 0 and entered < m and entered - left < p:
            ready[0].append((1, 0, entered, now))
            entered += 1
        choice = min((a for a in ready[r] if a[3] <= now), default=None)
        if choice is None:
            continue
        ready[r].remove(choice)
        is_f, s, i = choice[0], -choice[1], choice[2]
        rows[r].append(Action("F" if is_f else "BW", places[s][1], i))
        free[r] = end = now + (1 if is_f else 2)
        then = (1, s + 1) if is_f and s + 1 < len(places) else (0, s if is_f else s - 1)
        there = places[max(then[1], 0)][0]  # after the last backward: the rank where the next microbatch may enter
        if then[1] < 0:
            left += 1
        else:
            ready[there].append((then[0], -then[1], i, end))
        heapq.heappush(clock, (end, there))
        heapq.heappush(clock, (end, r))
    return Table("hanayo", p, v, m, "wave", tuple(map(tuple, rows)))


def chimera(stages: int, microbatches: int) -> Table:
    """Two pipelines in opposite directions, half of the microbatches each. Li and Hoefler 2021, arXiv 2107.06925.

    Units of p microbatches, one behind the other. In slots of equal length, rank r runs forward i of the downward
    pipeline in slot 2i + r and its backward in slot 2p-1-r + 2i; the upward pipeline mirrors that and takes the slots
    between. p-2 idle slots.
    """
    p, m = stages, microbatches
    if p % 2 or m % 2:
        raise UserError(f"chimera: needs an even number of stages and of microbatches; {p} stages and {m} microbatches are not")
    rows = []
    for r in range(p):
        slots = []
        for i in range(m // 2):
            unit, k = divmod(i, p // 2)
            for chunk, place in ((0, r), (1, p - 1 - r)):
                at, number = 2 * p * unit + 2 * k, i + chunk * m // 2
                slots.append((at + place, Action("F", chunk, number)))
                slots.append((at + 2 * p - 1 - place, Action("BW", chunk, number)))
        rows.append(tuple(a for _, a in sorted(slots)))
    return Table("chimera", p, 2, m, "bidirectional", tuple(rows))
