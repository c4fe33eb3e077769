"""A table packed into ticks: what one SPMD program that moves all ranks in lockstep runs.

A tick has the slots F, B, W, in this order. Shape 'pairs': a rank fills each slot at most once a tick, with any
microbatches. Shape 'single': a rank runs one action a tick (BW is one action). What is sent arrives for the next tick;
only the loss gradient of a microbatch that leaves the last stage is there in the same tick, after the F slot.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from parallel.errors import UserError
from parallel.schedule.table import Action, ScheduleError, Table

SLOTS = "FBW"
SHAPES = ("pairs", "single")
ORDERS = ("keep", "retime")
# Fine time inside a tick: 0 gradient arrives, 1 F slot, 2 activation arrives, 3 loss gradient, 4 B slot, 5 W slot.
FINE = 6
Lives = dict[tuple[int, int], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class TickTable:
    """`at` gives the tick of every ('F'|'B'|'W', global stage, microbatch); a BW is a B and a W in one tick."""

    table: Table
    shape: str
    at: dict[tuple[str, int, int], int]
    order: str = "keep"

    @cached_property
    def length(self) -> int:
        """Number of ticks."""
        return max(self.at.values()) + 1

    @property
    def forward_only(self) -> bool:
        """No B and no W."""
        return self.table.forward_only

    @cached_property
    def fused(self) -> bool:
        """Every W is in its B's tick: both are then one program, and nothing is stashed between them."""
        return all(self.at["B", s, m] == t for (k, s, m), t in self.at.items() if k == "W")

    @cached_property
    def grid(self) -> np.ndarray:
        """int [ticks, ranks, 3 (F, B, W), 2 (chunk, microbatch)], -1 where a slot is idle."""
        grid = np.full((self.length, self.table.stages, 3, 2), -1, np.int32)
        for (kind, s, m), t in self.at.items():
            r, c = self.table.places[s]
            grid[t, r, SLOTS.index(kind)] = c, m
        return grid

    @cached_property
    def busy(self) -> np.ndarray:
        """bool [ticks, ranks, 3]: which slots each rank fills."""
        return self.grid[..., 0] >= 0

    def held(self) -> np.ndarray:
        """bool [ticks, 3]: which slots any rank fills."""
        return self.busy.any(1)

    def phases(
        self, max_phases: int = 8, costs: tuple[float, float, float] = (1, 1, 1)
    ) -> list[tuple[int, int, tuple[bool, ...]]]:
        """Idle mode *compute*: runs [(start, stop, (F, B, W) held)] of ticks that share one program, at most
        `max_phases`.

        Runs of equal slots are joined with neighbours (which adds idle slots) at the least extra cost: exact, by
        dynamic programming.
        """
        held = self.held()
        edges = np.array([0, *(np.flatnonzero((held[1:] != held[:-1]).any(1)) + 1), len(held)])
        while len(edges) > 258:  # a table without any rhythm: join the cheapest neighbours first, to keep the exact part quick
            union = np.logical_or.reduceat(held, edges[:-1])
            change = (union[1:] ^ union[:-1]) @ np.asarray(costs, float)  # the cheap joints: where few slots differ
            keep = np.sort(np.argsort(change, kind="stable")[-200:])
            edges = np.concatenate([edges[:1], edges[1:-1][keep], edges[-1:]])
        slots = np.logical_or.reduceat(held, edges[:-1])
        n = len(slots)
        # has[i, j, slot]: whether runs i..j hold the slot; each segment costs its ticks times all that it holds
        last = np.maximum.accumulate(np.where(slots, np.arange(n)[:, None], -1))
        has = last[None] >= np.arange(n)[:, None, None]
        segment = (edges[None, 1:] - edges[:-1, None]) * (has @ np.asarray(costs, float))
        segment[np.tril_indices(n, -1)] = np.inf
        best, choice = [np.array([0.0] + [np.inf] * n)], []  # best[k][j]: the first j runs in k phases
        for _ in range(min(max_phases, n)):
            total = best[-1][:n, None] + segment
            choice.append(total.argmin(0))
            best.append(np.concatenate([[np.inf], total.min(0)]))
        k = min(range(1, len(best)), key=lambda k: (best[k][n], k))
        phases, j = [], n
        while j:
            k, i = k - 1, int(choice[k - 1][j - 1])
            phases.append((int(edges[i]), int(edges[j]), tuple(bool(x) for x in has[i, j - 1])))
            j = i
        return phases[::-1]

    def cost(self, F: float = 1.0, B: float = 1.0, W: float = 1.0, idle: str = "skip", max_phases: int = 8) -> float:
        """Time of all ticks, in the unit of F, B and W: times of one full rank and one microbatch.

        idle='skip': a tick costs the largest sum of own slots over the ranks. 'compute': all slots that its phase
        holds.
        """
        unit = np.array([F, B, W], float) * self.table.share
        if idle == "skip":
            return float((self.busy @ unit).max(1).sum())
        if idle != "compute":
            raise UserError(f"idle is 'skip' or 'compute', not {idle!r}")
        return float(
            sum((stop - start) * (unit @ np.array(slots)) for start, stop, slots in self.phases(max_phases, (F, B, W)))
        )

    # ------------------------------------------------------------------------------------------- what is stashed
    def lifetimes(self) -> dict[str, list[Lives]]:
        """{class: [per rank {(stage, microbatch): (first, last)}]} in fine time (6 * tick + phase), both ends included.

        a: residuals only B reads. aw: residuals W reads. cut: what B hands to W. x: arrived activations. g: arrived
        gradients. A fused table has no aw and no cut; a forward-only table has x alone.
        """
        at, table = self.at, self.table
        classes = ("x",) if self.forward_only else ("a", "x", "g") if self.fused else ("a", "aw", "cut", "x", "g")
        lives: dict[str, list[Lives]] = {k: [{} for _ in range(table.stages)] for k in classes}
        before = [table.before(s) for s in range(len(table.places))]
        after = [table.after(s) for s in range(len(table.places))]
        for (kind, s, m), f in at.items():
            if kind != "F":
                continue
            r, key = table.places[s][0], (s, m)
            if before[s] >= 0:
                lives["x"][r][key] = (FINE * at["F", before[s], m] + 2, FINE * f + 1)
            if self.forward_only:
                continue
            b = at["B", s, m]
            lives["a"][r][key] = (FINE * f + 1, FINE * b + 4)
            lives["g"][r][key] = (FINE * (at["B", after[s], m] + 1) if after[s] >= 0 else FINE * f + 3, FINE * b + 4)
            if not self.fused:
                w = at["W", s, m]
                lives["aw"][r][key] = (FINE * f + 1, FINE * w + 5)
                lives["cut"][r][key] = (FINE * b + 4, FINE * w + 5)
        return lives

    def rank_peaks(self) -> dict[str, list[int]]:
        """{class: per rank, the largest number of entries alive at once}."""
        return {k: [_overlap(lives.values(), FINE * self.length) for lives in ranks] for k, ranks in self.lifetimes().items()}

    def peaks(self) -> dict[str, int]:
        """{class: the largest rank's peak}: what every rank allocates."""
        return {k: max(ranks) for k, ranks in self.rank_peaks().items()}

    @cached_property
    def peak_activations(self) -> list[float]:
        """Per rank, in microbatches of one full rank: what is held from F until its W."""
        share = self.table.share
        first = [[] for _ in range(self.table.stages)]
        for (kind, s, m), t in self.at.items():
            if kind == "F" and not self.forward_only:
                first[self.table.places[s][0]].append((FINE * t + 1, FINE * self.at["W", s, m] + 5))
        return [share * _overlap(lives, FINE * self.length) for lives in first]

    # ------------------------------------------------------------------------------------------- back, and checks
    def unpack(self) -> list[list[Action]]:
        """Each rank's actions in the order in which the ticks run them; a B and W of the same unit in one tick become
        BW.
        """
        whole = self.table.whole
        ranks: list[list[tuple[int, int, Action]]] = [[] for _ in range(self.table.stages)]
        for (kind, s, m), t in self.at.items():
            if whole and kind == "W":
                continue
            r, c = self.table.places[s]
            ranks[r].append((t, SLOTS.index(kind), Action("BW" if whole and kind == "B" else kind, c, m)))
        return [[a for *_, a in sorted(rank)] for rank in ranks]

    def validate(self) -> TickTable:
        """Return itself, or raise ScheduleError: every slot at most once a tick, every need met in time."""
        at, table = self.at, self.table
        used: dict[tuple[int, int, str], tuple[str, int, int]] = {}
        single = self.shape == "single"
        for (kind, s, m), t in at.items():
            r, what = table.places[s][0], f"{table.name}: tick {t}: {kind} of stage {s}, microbatch {m}"
            if table.whole and kind == "W":
                if at["B", s, m] != t:
                    raise ScheduleError(f"{what}: apart from its B in a table of whole backwards")
                continue
            slot = (t, r, "any" if single else kind)
            if used.setdefault(slot, (kind, s, m)) != (kind, s, m):
                raise ScheduleError(f"{what}: rank {r} already runs {used[slot]} in this slot")
            other = table.before(s) if kind == "F" else table.after(s) if kind == "B" else -1
            own = {"F": None, "B": "F", "W": "B"}[kind]
            if (other >= 0 and at[kind, other, m] >= t) or (own and at[own, s, m] > t):
                raise ScheduleError(f"{what}: before what it needs is there")
        return self


def _overlap(intervals, length: int) -> int:
    """The most intervals [first, last] that share a point."""
    change = np.zeros(length + FINE + 1, np.int64)
    for first, last in intervals:
        change[first] += 1
        change[last + 1] -= 1
    return int(change.cumsum().max(initial=0))


def pack(table: Table, shape: str = "pairs", order: str = "keep") -> TickTable:
    """Pack a linear, loop or V table into ticks, each action in the earliest tick that its needs allow.

    order='keep': each rank keeps its order, and so the table's memory. 'retime': only the orders of its F, of its B and
    of its W are kept, and these run side by side; faster, with more in flight. W then starts on all ranks in the same
    tick. Raises UserError for placements that do not execute.
    """
    if table.placement not in ("linear", "loop", "v"):
        raise UserError(
            f"{table.name}: a {table.placement} placement is for simulation and drawing; ticks need linear, loop or v"
        )
    if shape not in SHAPES:
        raise UserError(f"the shape of a tick is one of {', '.join(SHAPES)}, not {shape!r}")
    if order not in ORDERS:
        raise UserError(f"the packing order is one of {', '.join(ORDERS)}, not {order!r}")
    return TickTable(table, shape, (_keep if order == "keep" else _retime)(table, shape == "single"), order)


def best_ticks(table: Table, costs: tuple[float, float, float] = (1, 1, 1), idle: str = "skip") -> TickTable:
    """The table in the cheaper shape of ticks; each rank keeps its order, and so its memory. Raises as `pack` does."""
    return min((pack(table, shape) for shape in SHAPES), key=lambda ticks: ticks.cost(*costs, idle=idle))


def _keep(table: Table, single: bool) -> dict[tuple[str, int, int], int]:
    grid, at = table.stage_grid, {}
    last = [(-1, 2)] * table.stages  # (tick, slot) that a rank filled last
    for r, _, (kind, chunk, m), need in table.in_order():
        s, slot = grid[r][chunk], 0 if kind == "F" else 1 if kind in ("B", "BW") else 2
        tick = last[r][0] + (single or slot <= last[r][1])
        if need is not None:
            tick = max(tick, at[need] + 1)
        at["B" if kind == "BW" else kind, s, m] = tick
        if kind == "BW":
            at["W", s, m], slot = tick, 2
        last[r] = tick, slot
    return at


def _retime(table: Table, single: bool) -> dict[tuple[str, int, int], int]:
    """Three queues a rank. In pairs each slot takes its queue's head when that is ready; single ticks take the earliest
    ready head.
    """
    p, grid, whole = table.stages, table.stage_grid, table.whole
    queues: list[dict[str, list[tuple[int, int, int]]]] = []  # per rank and slot: (position in the list, stage, microbatch)
    for r, rank in enumerate(table.ranks):
        queues.append({k: [] for k in SLOTS})
        for i, a in enumerate(rank):
            queues[r][a.kind[0]].append((i, grid[r][a.chunk], a.microbatch))
    before = [table.before(s) for s in range(len(table.places))]
    after = [table.after(s) for s in range(len(table.places))]
    at: dict[tuple[str, int, int], int] = {}
    head = [dict.fromkeys(SLOTS, 0) for _ in range(p)]
    left = sum(len(q) for rank in queues for q in rank.values())
    weights = False  # W waits until every rank has one: the ranks then enter and leave W together
    tick = 0
    while left:
        for r in range(p):
            ready = []
            for kind in SLOTS:
                if head[r][kind] >= len(queues[r][kind]):
                    continue
                i, s, m = queues[r][kind][head[r][kind]]
                if kind == "F":
                    ok = before[s] < 0 or at.get(("F", before[s], m), tick) < tick
                elif kind == "B":
                    own = at.get(("F", s, m), tick + 1)
                    ok = own < tick + (not single) and (after[s] < 0 or at.get(("B", after[s], m), tick) < tick)
                else:
                    ok = weights and at.get(("B", s, m), tick + 1) < tick + (not single)
                if not ok:
                    continue
                ready.append((i, kind, s, m))
                if not single:  # done at once: a B may follow its F, a W its B, in the same tick
                    at[kind, s, m] = tick
            chosen = [min(ready)] if single and ready else ready
            for _, kind, s, m in chosen:
                at[kind, s, m] = tick
                head[r][kind] += 1
                left -= 1
                if whole and kind == "B":
                    at["W", s, m] = tick
        if not weights and not whole:
            weights = all(head[r]["B"] or not queues[r]["B"] for r in range(p))
            if weights and not single:  # in this very tick
                for r in range(p):
                    _, s, m = queues[r]["W"][0]
                    if at.get(("B", s, m), tick + 1) <= tick:
                        at["W", s, m] = tick
                        head[r]["W"], left = 1, left - 1
        tick += 1
    return at
