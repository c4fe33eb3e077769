"""Improve a table by local search, as for a job shop: move actions on a critical path past their neighbours on the same
rank.

Only moves inside a block (actions of one rank on the critical path without a gap) can help; each is estimated from the
longest paths to and from its surroundings, the best one that is not tabu is made and the table is timed again. Moves
that would break a dependency or a rank's memory limit are left out. After Balas and Vazacopoulos 1998 and Nowicki and
Smutnicki 1996.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from parallel.schedule.table import Action, Table

TINY = 1e-9
REACH = 8  # actions that a move passes at most


class _Timed:
    """A table as integers: per node its duration, the node it waits for, and those that wait for it."""

    def __init__(self, table: Table, costs: np.ndarray, comm: float, span: bool):
        self.span = span
        self.duration, self.need, self.lag, self.own, self.change, self.actions = [], [], [], [], [], []
        self.rank: list[int] = []
        self.orders: list[list[int]] = []
        ids: dict[tuple[str, int, int], int] = {}
        columns = {"F": (0,), "B": (1,), "W": (2,), "BW": (1, 2)}
        for r, row in enumerate(table.ranks):
            start = len(self.actions)
            for a in row:
                stage = table.stage_grid[r][a.chunk]
                ids["B" if a.kind == "BW" else a.kind, stage, a.microbatch] = len(self.actions)
                self.actions.append(a)
                self.rank.append(r)
                self.duration.append(float(sum(costs[stage, k] for k in columns[a.kind])))
                self.change.append({"F": 1, "B": 0}.get(a.kind, -1))
            self.orders.append(list(range(start, len(self.actions))))
        self.after: list[list[tuple[int, float]]] = [[] for _ in self.actions]
        for n, a in enumerate(self.actions):
            r = self.rank[n]
            stage = table.stage_grid[r][a.chunk]
            other = table.waits_for(r, a)
            before = (
                ids["B", stage, a.microbatch] if a.kind == "W" else ids["F", stage, a.microbatch] if a.kind[0] == "B" else -1
            )
            need = ids[other] if other else before
            lag = comm if need >= 0 and self.rank[need] != r else 0.0
            self.need.append(need)
            self.own.append(before)
            self.lag.append(lag)
            if need >= 0:
                self.after[need].append((n, lag))
        self.position = [0] * len(self.actions)
        for order in self.orders:
            self.index(order, 0)

    def index(self, order: list[int], start: int, stop: int | None = None) -> None:
        for i in range(start, len(order) if stop is None else stop):
            self.position[order[i]] = i

    def time(self) -> tuple[float, list[float], list[float], list[float]] | None:
        """(value, end of every node, longest path from its start on, the ranks' offsets); None for a deadlock."""
        duration, need, lag = self.duration, self.need, self.lag
        end = [-1.0] * len(duration)
        done: list[int] = []
        waiting: dict[int, int] = {}
        ranks = len(self.orders)
        position, free, first = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        ready = list(range(ranks))
        while ready:
            r = ready.pop()
            order, i, t = self.orders[r], position[r], free[r]
            while i < len(order):
                n = order[i]
                j = need[n]
                if j >= 0:
                    e = end[j]
                    if e < 0:
                        waiting[j] = r
                        break
                    e += lag[n]
                    if e > t:
                        t = e
                if i == 0:
                    first[r] = t
                t += duration[n]
                end[n] = t
                done.append(n)
                i += 1
                if n in waiting:
                    ready.append(waiting.pop(n))
            position[r], free[r] = i, t
        if len(done) < len(duration):
            return None
        offset = [-f for f in first] if self.span else [0.0] * ranks
        tail, last, after, rank = [0.0] * len(duration), offset[:], self.after, self.rank
        for n in reversed(done):
            t = last[rank[n]]
            for k, gap in after[n]:
                x = tail[k] + gap
                if x > t:
                    t = x
            t += duration[n]
            tail[n] = last[rank[n]] = t
        return max(f + o for f, o in zip(free, offset)), end, tail, offset

    def blocks(self, timed, rng: random.Random) -> list[list[int]]:
        """One critical path, cut into blocks of at least two neighbours on a rank."""
        value, end, _, offset = timed
        last = [o[-1] for r, o in enumerate(self.orders) if end[o[-1]] + offset[r] >= value - 1e-7]
        n = rng.choice(last)
        path = [n]
        while True:
            start = end[n] - self.duration[n] - 1e-7
            if start <= 0:
                break
            i, order = self.position[n], self.orders[self.rank[n]]
            before = [order[i - 1]] if i and end[order[i - 1]] >= start else []
            j = self.need[n]
            if j >= 0 and end[j] + self.lag[n] >= start:
                before.append(j)
            if not before:
                break
            n = rng.choice(before)
            path.append(n)
        path.reverse()
        blocks = [[path[0]]]
        for n in path[1:]:
            m = blocks[-1][-1]
            if self.rank[n] == self.rank[m] and self.position[n] == self.position[m] + 1:
                blocks[-1].append(n)
            else:
                blocks.append([n])
        return [b for b in blocks if len(b) > 1]

    def allowed(self, r: int, i: int, j: int, end: list[float]) -> tuple[int, list[int], list[tuple[int, int]]] | None:
        """Move the node at position i of rank r to position j: (first position, the new segment, (earlier, later)
        pairs).
        """
        order = self.orders[r]
        n = order[i]
        if j < i:
            passed = order[j:i]
            need = self.need[n]
            if need in passed or self.own[n] in passed:
                return None
            # a path from passed[0] to what n needs would have made that start later
            if need >= 0 and self.rank[need] != r and end[need] - self.duration[need] >= end[passed[0]] - TINY:
                return None
            return j, [n, *passed], [(n, x) for x in passed]
        passed = order[i + 1 : j + 1]
        for x in passed:
            need = self.need[x]
            if need == n or self.own[x] == n:
                return None
            if need >= 0 and self.rank[need] != r and end[need] - self.duration[need] >= end[n] - TINY:
                return None
        return i, [*passed, n], [(x, n) for x in passed]

    def shake(self, timed, limit: int, rng: random.Random):
        """Swap two random neighbours, if that is possible; returns the new times."""
        r = rng.randrange(len(self.orders))
        order = self.orders[r]
        if len(order) < 2:
            return timed
        i = rng.randrange(1, len(order))
        move = self.allowed(r, i, i - 1, timed[1])
        if move is None or _running(self, order)[i - 1] + self.change[order[i]] > limit:
            return timed
        order[i - 1 : i + 1] = move[1]
        after = self.time()
        if after is None:
            order[i - 1 : i + 1] = move[1][::-1]
            return timed
        self.index(order, i - 1, i + 1)
        return after

    def estimate(self, r: int, at: int, segment: list[int], timed) -> float:
        """Length of the longest path through a new segment, the rest as it is."""
        _, end, tail, offset = timed
        order = self.orders[r]
        t = end[order[at - 1]] if at else 0.0
        starts = []
        for n in segment:
            j = self.need[n]
            if j >= 0:
                t = max(t, end[j] + self.lag[n])
            starts.append(t)
            t += self.duration[n]
        beyond = at + len(segment)
        rest = tail[order[beyond]] if beyond < len(order) else offset[r]
        worst = 0.0
        for n, start in zip(reversed(segment), reversed(starts)):
            for k, gap in self.after[n]:
                rest = max(rest, tail[k] + gap)
            rest += self.duration[n]
            worst = max(worst, start + rest)
        return worst


def improve(
    table: Table, costs: np.ndarray, comm: float, limit: int, span: bool, steps: int, seed: int = 0
) -> tuple[float, Table]:
    """(value, table): the best table found in `steps` moves, never worse than the given one.

    costs: [stages, 3]. limit: chunk activations that a rank may hold. span: minimise the longest rank span, else the
    makespan. Raises nothing: a table that exceeds the limit from the start is returned as it is.
    """
    work, rng = _Timed(table, costs, comm, span), random.Random(seed)
    timed = work.time()
    best, orders = timed[0], [o[:] for o in work.orders]
    start = best
    tabu: dict[tuple[int, int], int] = {}
    held = [_running(work, o) for o in work.orders]
    if max(map(max, held)) > limit:
        return best, table
    stuck = 0
    for step in range(steps):
        choice = None
        for block in work.blocks(timed, rng):
            r, a, z = work.rank[block[0]], work.position[block[0]], work.position[block[-1]]
            moves = [m for t in range(max(a, z - REACH), z) for m in ((z, t), (t, z))]
            moves += [m for t in range(a + 1, min(z, a + REACH)) for m in ((t, a), (a, t))]
            for i, j in moves:
                move = work.allowed(r, i, j, timed[1])
                if move is None:
                    continue
                at, segment, pairs = move
                h = held[r][at]
                for n in segment:
                    h += work.change[n]
                    if h > limit:
                        break
                if h > limit:
                    continue
                value = work.estimate(r, at, segment, timed)
                if value >= best - TINY and any(tabu.get(x, -1) >= step for x in pairs):
                    continue
                value += rng.random() * 1e-3 * work.duration[segment[0]]
                if choice is None or value < choice[0]:
                    choice = (value, r, at, segment, pairs)
        if choice is None:  # nothing left to do from here: back to the best, shaken
            stuck += 1
            if stuck > 40:
                break
            tabu.clear()
            work.orders = [o[:] for o in orders]
            for o in work.orders:
                work.index(o, 0)
            timed = work.time()
            for _ in range(stuck):
                timed = work.shake(timed, limit, rng)
            held = [_running(work, o) for o in work.orders]
            continue
        _, r, at, segment, pairs = choice
        old = work.orders[r][at : at + len(segment)]
        work.orders[r][at : at + len(segment)] = segment
        after = work.time()
        if after is None:
            work.orders[r][at : at + len(segment)] = old
            tabu.update(dict.fromkeys(pairs, step + 50))
            continue
        timed = after
        work.index(work.orders[r], at, at + len(segment))
        held[r] = _running(work, work.orders[r])
        for x, y in pairs:
            tabu[y, x] = step + rng.randint(8, 16)
        if timed[0] < best - TINY:
            best, orders, stuck = timed[0], [o[:] for o in work.orders], 0
    if best >= start - TINY:
        return start, table
    ranks = tuple(tuple(Action(*work.actions[n]) for n in o) for o in orders)
    return best, dataclasses.replace(table, ranks=ranks, pairs=())


def _running(work: _Timed, order: list[int]) -> list[int]:
    """Chunk activations held before each position, and after the last."""
    out, now = [0], 0
    for n in order:
        now += work.change[n]
        out.append(now)
    return out
