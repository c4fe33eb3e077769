"""Zero Bubble schedules with one chunk a rank. Qi et al. 2023, arXiv 2401.10241."""

from __future__ import annotations

from itertools import product

from parallel.errors import UserError
from parallel.schedule.order import in_turn
from parallel.schedule.table import Action, Table

Costs = tuple[float, float, float]


def zb_h1(stages: int, microbatches: int) -> Table:
    """1F1B with W lagging by the rank: every rank holds p microbatches, the bubble is (p-1)(F+B-W)."""
    return _handcrafted("zb-h1", stages, microbatches, 1)


def zb_h2(stages: int, microbatches: int) -> Table:
    """Twice the warm-up and twice the lag: no bubble in a rank's own span, at 2p-1 microbatches.

    The ranks' spans are skewed by p-1 forwards: a step that ends with one global norm gains nothing over ZB-H1.
    """
    return _handcrafted("zb-h2", stages, microbatches, 2)


def _handcrafted(name: str, p: int, m: int, times: int) -> Table:
    units = [(0, i) for i in range(m)]
    ranks = tuple(in_turn(units, units, times * (p - 1 - r), times * r) for r in range(p))
    return Table(name, p, 1, m, "linear", ranks)


def zb_automatic(
    name: str, stages: int, microbatches: int, costs: Costs = (1, 1, 1), comm: float = 0.0, limit: float = 1.0
) -> Table:
    """ZB-1p (limit 1) and ZB-2p (limit 2): the paper's heuristic for measured times, section 3.1.

    limit: microbatches in flight, in units of p (at least 1 microbatch); half of a microbatch's memory is freed by B,
    half by W. Eight variants are tried (a small bubble before the first B allowed; a forward skipped when the next rank
    lags; gaps shorter than W filled) and the one with the shortest longest rank span is kept.
    """
    tries = [
        _Automatic(stages, microbatches, costs, comm, 2 * limit * stages, *flags).run()
        for flags in product((True, False), repeat=3)
    ]
    _, ranks = min(tries, key=lambda t: t[0])
    return Table(name, stages, 1, microbatches, "linear", tuple(tuple(rank) for rank in ranks))


HALVES = {"F": 2, "B": -1, "W": -1}  # of a microbatch's memory


class _Automatic:
    """One run of the heuristic."""

    def __init__(self, p: int, m: int, costs: Costs, comm: float, limit: float, early: bool, skip: bool, fill: bool):
        if limit < 2:
            raise UserError("a rank needs room for one microbatch at least")
        self.p, self.m, self.comm, self.limit = p, m, comm, limit
        self.early, self.skip, self.fill = early, skip, fill
        self.cost = dict(zip("FBW", costs))
        self.count = [dict.fromkeys("FBW", 0) for _ in range(p)]
        self.end = [{k: [] for k in "FBW"} for _ in range(p)]
        self.now, self.held, self.bubble = [0.0] * p, [0] * p, [0.0] * p
        self.ranks: list[list[Action]] = [[] for _ in range(p)]

    def arrives(self, r: int, kind: str) -> float:
        """When the next F or B of rank r has its input."""
        there = r - 1 if kind == "F" else r + 1
        if kind == "W" or not 0 <= there < self.p:
            return 0.0
        return self.end[there][kind][self.count[r][kind]] + self.comm

    def put(self, r: int, kind: str) -> None:
        start = max(self.now[r], self.arrives(r, kind))
        if self.ranks[r]:
            self.bubble[r] += start - self.now[r]
        self.ranks[r].append(Action(kind, 0, self.count[r][kind]))
        self.count[r][kind] += 1
        self.now[r] = start + self.cost[kind]
        self.end[r][kind].append(self.now[r])
        self.held[r] += HALVES[kind]

    def put_after_w(self, r: int, kind: str) -> None:
        """W while memory is full, then while they fit into the wait; one more when the wait would be the longest
        bubble.
        """
        count = self.count[r]
        while self.held[r] + HALVES[kind] > self.limit and count["W"] < count["B"]:
            self.put(r, "W")
        wait = lambda: self.arrives(r, kind) - self.now[r]
        while count["W"] < count["B"] and wait() >= self.cost["W"]:
            self.put(r, "W")
        if count["W"] < count["B"] and wait() > 0 and (self.fill or wait() > max(self.bubble) - self.bubble[r]):
            self.put(r, "W")
        if kind == "B" and r == 0 and count["F"] == self.m:
            while count["W"] < count["B"]:
                self.put(r, "W")
        self.put(r, kind)

    def warm_up(self) -> None:
        """As many forwards as memory allows without (or with a little) delay of the first B; rank r at least 1 ahead of
        r+1.
        """
        p, m = self.p, self.m
        for r in range(p):
            self.put(r, "F")
        more = [0] * p
        first_b = self.now[p - 1] + self.cost["B"]
        for r in range(p - 2, -1, -1):
            held, now, due = self.held[r], self.now[r], first_b + self.comm
            while 1 + more[r] < m and held + 2 <= self.limit:
                if now + self.cost["F"] > due if self.early else now >= due:
                    break
                held, now, more[r] = held + 2, now + self.cost["F"], more[r] + 1
            first_b = max(now, due) + self.cost["B"]
        for r in range(1, p):
            while 0 < more[r] >= more[r - 1] and 1 + more[r] < m:
                more[r] -= 1
        for r in range(p):
            for _ in range(more[r]):
                self.put(r, "F")
        for r in range(p - 1, -1, -1):
            self.put(r, "B")

    def wants_f(self, r: int) -> bool:
        """Whether rank r runs a forward in this round: not when the next rank, which lags, would only wait with it."""
        mine, cost = self.count[r], self.cost
        if mine["F"] >= self.m:
            return False
        if not self.skip or r + 1 == self.p or mine["F"] < self.count[r + 1]["F"] + 2:
            return True
        due = self.now[r + 1] + cost["F"] + cost["B"] + self.comm
        if self.now[r] >= due:
            return False
        over = max(0, self.held[r] + 2 - self.limit)
        needed = min(over, mine["B"] - mine["W"]) * cost["W"]
        if self.now[r] + cost["F"] + needed <= due:
            return True
        return due - self.now[r] > max(self.bubble) - self.bubble[r]

    def run(self) -> tuple[float, list[list[Action]]]:
        """(longest rank span, the ranks' lists)."""
        self.warm_up()
        for _ in range(1, self.m):
            wants = [self.wants_f(r) for r in range(self.p)]
            for r in range(self.p - 2, -1, -1):
                wants[r] = wants[r] and wants[r + 1]
            for r in range(self.p):
                if wants[r]:
                    self.put_after_w(r, "F")
            for r in range(self.p - 1, -1, -1):
                self.put_after_w(r, "B")
        for r in range(self.p):
            while self.count[r]["W"] < self.m:
                self.put(r, "W")
        first = [self.end[r]["F"][0] - self.cost["F"] for r in range(self.p)]
        return max(now - start for now, start in zip(self.now, first)), self.ranks
