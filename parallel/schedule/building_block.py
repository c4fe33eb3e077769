"""V schedules from a building block: six slots a rank that repeat for every microbatch. Qi et al. 2024, arXiv
2405.15362.

The block of rank r says in which slot (of unit length) F0, F1, B1, B0 of microbatch 0 run; microbatch i runs 6i slots
later, W in the next free slot after its B. Then: *squeeze* (every action as early as order and needs allow) and
*reorder* (in warm-up and cool-down, pull actions into earlier holes as long as the rank's peak does not rise).
"""

from __future__ import annotations

import numpy as np

from parallel.schedule.table import Action, Table

PERIOD = 6
KINDS = (("F", 0), ("F", 1), ("B", 1), ("B", 0))  # in the order in which a microbatch passes a rank
Block = list[tuple[int, int, int, int]]


def v_half_block(p: int) -> Block:
    """Lifespans of half a V-ZB: peak floor((p+2)/2) microbatches."""
    gap = 0 if p % 2 else 3
    return [(2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2) for r in range(p)]


def v_min_block(p: int) -> Block:
    """The shortest lifespans that unit slots allow: peak floor((p+4)/3) microbatches."""
    gap = 0 if p % 3 else 2
    return [(r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1) for r in range(p)]


def from_block(name: str, block: Block, microbatches: int, reorder: bool = True) -> Table:
    """The table of a building block: [ranks] of slots of (F0, F1, B1, B0)."""
    p, m = len(block), microbatches
    times = np.array(block)[:, :, None] + PERIOD * np.arange(m)  # [rank, kind, microbatch] -> slot
    if reorder:
        times = _reorder(times, with_w=True)
        times = _reorder(times, with_w=False)
    ranks = []
    for r in range(p):
        slots = {int(t): (k, i) for k, row in enumerate(times[r]) for i, t in enumerate(row)}
        ranks.append(tuple(_with_w(slots)))
    return Table(name, p, 2, m, "v", tuple(ranks))


def _with_w(slots: dict[int, tuple[int, int]]) -> list[Action]:
    """One rank's list: W in free slots as soon as its B is done, chunk 1 before chunk 0."""
    out, waiting = [], ([], [])
    for t in range(min(slots), max(slots) + 1):
        if t in slots:
            k, i = slots[t]
            out.append(Action(*KINDS[k], i))
            if k >= 2:
                waiting[k - 2].append(i)
        elif waiting[0] or waiting[1]:
            k = 0 if waiting[0] else 1
            out.append(Action("W", 1 - k, waiting[k].pop(0)))
    return out + [Action("W", 1 - k, i) for k in (0, 1) for i in waiting[k]]


def _squeeze(times: np.ndarray, w: list[np.ndarray]) -> np.ndarray:
    """Every action as early as its rank's order and its needs allow, W included (unit slots, no delay between ranks)."""
    p, _, m = times.shape
    out = np.zeros_like(times)
    events = sorted(
        [(int(times[r, k, i]), r, k, i) for r in range(p) for k in range(4) for i in range(m)]
        + [(int(t), r, 4, i) for r in range(p) for i, t in enumerate(w[r])]
    )
    free = [0] * p
    done = np.zeros((p, 4, m), np.int64).tolist()  # end of each action
    for _, r, k, i in events:
        start = free[r]
        if k < 4:
            before = r - 1 if k in (0, 2) else r + 1
            if 0 <= before < p:
                start = max(start, done[before][k][i])
            if k:
                start = max(start, done[r][k - 1][i])
            out[r, k, i] = start
            done[r][k][i] = start + 1
        free[r] = start + 1
    return out


def _place_w(times: np.ndarray) -> np.ndarray:
    """Slots of one rank's W: each free slot takes the oldest that waits. times: [kind, microbatch]."""
    taken = np.zeros(int(times.max()) + 1, bool)
    taken[times.ravel()] = True
    ready = np.zeros(len(taken) + 1, np.int64)
    np.add.at(ready, times[2:].ravel() + 1, 1)
    waiting, out = 0, []
    for t, (busy, new) in enumerate(zip(taken.tolist(), ready.tolist())):
        waiting += new
        if not busy and waiting:
            waiting -= 1
            out.append(t)
    left = 2 * times.shape[1] - len(out)
    return np.array(out + list(range(len(taken), len(taken) + left)), np.int64)


class _Rank:
    """Occupied slots of one rank and the memory profile that they give."""

    def __init__(self, times: np.ndarray, w: np.ndarray | None):
        self.length = int(max(times.max(), -1 if w is None else w.max())) + 2
        self.forward, self.backward, self.weight, self.taken = (np.zeros(self.length, np.int64) for _ in range(4))
        np.add.at(self.forward, times[:2].ravel(), 1)
        np.add.at(self.backward, times[2:].ravel(), 1)
        self.free = np.ones(self.length, np.int64)  # where W may run when it has no place of its own
        self.free[times.ravel()] = 0
        self.with_w = w is not None
        if w is not None:
            np.add.at(self.weight, w, 1)

    def peak(self) -> int:
        """The largest number of chunk activations held, while the last B is not done."""
        held = np.cumsum(self.forward)
        if self.with_w:
            return int((held - np.cumsum(self.weight)).max())
        ready = np.cumsum(self.backward) - self.backward  # B done before this slot
        room = np.cumsum(self.free)
        spent = room + np.minimum(np.minimum.accumulate(ready - room + self.free), 0)
        return int((held - np.minimum(spent, ready)).max())

    def move(self, k: int, old: int, new: int) -> None:
        """Move an action of kind k (4: W) from slot `old` to `new`."""
        line = self.forward if k < 2 else self.backward if k < 4 else self.weight
        line[old] -= 1
        line[new] += 1
        if k < 4:
            self.free[old], self.free[new] = 1, 0


def _reorder(times: np.ndarray, with_w: bool) -> np.ndarray:
    """Pull actions into earlier holes, in the order of time: in the cool-down, and in the warm-up when W has its place."""
    p, _, m = times.shape
    times = times.copy()
    w = [_place_w(times[r]) for r in range(p)]
    ranks = [_Rank(times[r], w[r] if with_w else None) for r in range(p)]
    limit = max(rank.peak() for rank in ranks)
    taken = [np.zeros(rank.length, bool) for rank in ranks]
    events = sorted(
        [(int(times[r, k, i]), r, k, i) for r in range(p) for k in range(4) for i in range(m)]
        + ([(int(t), r, 4, i) for r in range(p) for i, t in enumerate(w[r])] if with_w else [])
    )
    phase = 0
    for t, r, k, i in events:
        if phase == 0 and (r, k) == (0, 3):
            phase = 1
        still = phase == 1 or (phase == 0 and not with_w)
        if phase == 1 and k == 0 and i == m - 1:
            phase = 2
        slot = t
        if not still:
            if k == 4:
                first = int(np.sort(times[r, 2:].ravel())[i])
            else:
                before = r - 1 if k in (0, 2) else r + 1
                first = int(times[before, k, i]) if 0 <= before < p else -1
                first = max(first, int(times[r, k - 1, i]) if k else -1)
            if i:
                first = max(first, int(w[r][i - 1] if k == 4 else times[r, k, i - 1]))
            for earlier in np.flatnonzero(~taken[r][first + 1 : t]) + first + 1:
                ranks[r].move(k, t, int(earlier))
                if ranks[r].peak() <= limit:
                    slot = int(earlier)
                    break
                ranks[r].move(k, int(earlier), t)
        if k == 4:
            w[r][i] = slot
        else:
            times[r, k, i] = slot
        taken[r][slot] = True
    if not with_w:
        w = [_place_w(times[r]) for r in range(p)]
    return _squeeze(times, w)
