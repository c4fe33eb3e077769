"""Place the weight gradients of a table anew, for given costs and a memory limit."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from parallel.schedule.table import Action, Table

NEVER = float("inf")
TINY = 1e-9


def place_w(table: Table, costs: np.ndarray, comm: float, limit: int, patience: float) -> Table | None:
    """Keep each rank's order of F and B; put a W where the rank would wait, or where memory is full.

    costs: [stages, 3]. limit: chunk activations a rank may hold. patience: a W is started when the next input is known
    to be at least `patience` of its length away (0: whenever the rank waits; 1: never delays anything known). None when
    it gets stuck.
    """
    table = table.split_backward()
    lists = [[a for a in rank if a.kind != "W"] for rank in table.ranks]
    grid, places = table.stage_grid, table.places
    length = {k: costs[:, i].tolist() for i, k in enumerate("FBW")}
    arrived: dict[tuple[str, int, int], float] = {}
    out: list[list[Action]] = [[] for _ in lists]
    waiting: list[list[Action]] = [[] for _ in lists]
    begun, held, free = [0] * len(lists), [0] * len(lists), [0.0] * len(lists)
    position = [0] * len(lists)
    clock = [(0.0, r) for r in range(len(lists))]
    left = sum(map(len, lists))
    while clock:
        now, r = heapq.heappop(clock)
        if free[r] > now + TINY:
            continue
        full, due, action = False, NEVER, None
        if position[r] < len(lists[r]):
            action = lists[r][position[r]]
            stage = grid[r][action.chunk]
            first = action.kind == "F" and table.before(stage) < 0
            due = 0.0 if first else arrived.get((action.kind, stage, action.microbatch), NEVER)
            full = action.kind == "F" and held[r] + 1 > limit
        if action is None or due > now + TINY or full:
            weights = begun[r] < len(waiting[r])
            gap = due - now if not full else NEVER
            if not weights or gap < patience * length["W"][grid[r][waiting[r][begun[r]].chunk]] - TINY:
                if full and not weights:
                    return None
                continue
            action = waiting[r][begun[r]]
            begun[r] += 1
            held[r] -= 1
        else:
            position[r] += 1
            left -= 1
            held[r] += action.kind == "F"
        stage = grid[r][action.chunk]
        out[r].append(action)
        free[r] = end = now + length[action.kind][stage]
        heapq.heappush(clock, (end, r))
        if action.kind == "W":
            continue
        if action.kind == "B":
            waiting[r].append(action._replace(kind="W"))
        nxt = (table.after if action.kind == "F" else table.before)(stage)
        kind = action.kind
        if action.kind == "F" and nxt < 0:
            nxt, kind = stage, "B"
        if nxt >= 0:
            there = places[nxt][0]
            when = end + (comm if there != r else 0.0)
            arrived[kind, nxt, action.microbatch] = when
            heapq.heappush(clock, (when, there))
    if left:
        return None
    return dataclasses.replace(table, ranks=tuple(map(tuple, out)), pairs=())
