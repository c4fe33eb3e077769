"""Schedules on a V: rank r holds stages r and 2p-1-r, so the first and the last stage are neighbours on rank 0."""

from __future__ import annotations

from parallel.schedule.building_block import from_block, v_half_block, v_min_block
from parallel.schedule.table import Action, Table


class Row:
    """One rank's list, written as in the papers: the next microbatch of every kind and chunk is counted by itself."""

    def __init__(self, microbatches: int):
        self.m, self.actions, self.count = microbatches, [], {}

    def next(self, kind: str, chunk: int) -> int:
        """The number of the next microbatch of this kind and chunk."""
        return self.count.get((kind, chunk), 0)

    def add(self, what: str) -> None:
        """Append actions like 'F0 B1 W1'; those beyond the last microbatch are left out."""
        for word in what.split():
            key = (word[:-1], int(word[-1]))
            i = self.next(*key)
            if i < self.m:
                self.count[key] = i + 1
                self.actions.append(Action(*key, i))


def zb_v(stages: int, microbatches: int) -> Table:
    """ZB-V, handcrafted for F=B=W: no bubble in a rank's own span, p microbatches on every rank.

    Zero Bubble, arXiv 2401.10241, section 6; the order as in PyTorch's ScheduleZBVZeroBubble. Built for at least 2p-1
    microbatches; a surplus is deleted.
    """
    p, m = stages, max(microbatches, 2 * stages - 1)
    ranks = []
    for r in range(p):
        row = Row(m)
        row.add("F0 " * (2 * (p - r) - 1) + "F1 F0 " * r + "F1 B1 W1 " * (p - r))
        while row.next("F", 1) < m:
            row.add("F0 B0 W0 F1 B1 W1")
        row.add("B0 B1 " * r + "B0 W0 " * (p - r) + "W1 " * m + "W0 " * m)
        ranks.append(tuple(row.actions))
    return Table("zb-v", p, 2, m, "v", tuple(ranks)).only(microbatches)


def v_half(stages: int, microbatches: int) -> Table:
    """V-Half: half of 1F1B's memory, floor((p+2)/2) microbatches, at about half of its bubble. arXiv 2405.15362."""
    return from_block("v-half", v_half_block(stages), microbatches)


def v_min(stages: int, microbatches: int) -> Table:
    """V-Min: a third of 1F1B's memory, floor((p+4)/3) microbatches. arXiv 2405.15362."""
    return from_block("v-min", v_min_block(stages), microbatches)
