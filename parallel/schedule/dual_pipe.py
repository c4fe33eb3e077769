"""DualPipe and DualPipeV: a forward and a backward of different microbatches overlap in pairs. DeepSeek, arXiv
2412.19437.

Eight steps; the words are the next microbatch of a kind and chunk, W takes the oldest weight gradient that waits, and
F&B joins a forward and a whole backward. github.com/deepseek-ai/DualPipe: dualpipe.py, dualpipev.py.
"""

from __future__ import annotations

from collections import deque

from parallel.errors import UserError
from parallel.schedule.table import Action, Table


class _Row:
    """One rank's list; chunk k is the rank's module of phase k (swapped when `flip`), microbatches counted from
    `first`.
    """

    def __init__(self, flip: bool, first: tuple[int, int]):
        self.flip, self.count = (
            flip,
            {("F", c): n for c, n in enumerate(first)} | {("B", c): n for c, n in enumerate(first)},
        )
        self.actions: list[Action] = []
        self.pairs: set[int] = set()
        self.waiting: deque[tuple[int, int]] = deque()

    def unit(self, kind: str, phase: int) -> tuple[int, int]:
        chunk = phase ^ self.flip
        i = self.count[kind, chunk]
        self.count[kind, chunk] += 1
        return chunk, i

    def forward(self, phase: int) -> None:
        self.actions.append(Action("F", *self.unit("F", phase)))

    def backward(self, phase: int, split: bool = False) -> None:
        unit = self.unit("B", phase)
        self.actions.append(Action("B" if split else "BW", *unit))
        if split:
            self.waiting.append(unit)

    def weight(self) -> None:
        self.actions.append(Action("W", *self.waiting.popleft()))

    def pair(self, f: int, b: int) -> None:
        self.pairs.add(len(self.actions))
        self.forward(f)
        self.backward(b)

    def steps(self, half: int, h: int, middle: int, last: bool) -> None:
        """All eight steps. half: ranks of the (half) pipe. h: position in it. middle: count of step 4. last: h is the
        last.
        """
        for _ in range(2 * (half - h - 1)):
            self.forward(0)
        for _ in range(h + 1):
            self.forward(0)
            self.forward(1)
        for _ in range(half - h - 1):
            self.backward(1, split=True)
            self.weight()
            self.forward(1)
        for i in range(middle):
            if i == 0 and last:  # not overlapped, to hand on the gradient earlier
                self.forward(0)
                self.backward(1)
            else:
                self.pair(0, 1)
            self.pair(1, 0)
        for _ in range(half - h - 1):
            self.backward(1)
            self.pair(1, 0)
        split = False
        for i in range(h + 1):
            split |= i == (h + 1) // 2 and h % 2 == 1
            self.backward(1, split)
            split |= i == (h + 1) // 2 and h % 2 == 0
            self.backward(0, split)
        for _ in range(half - h - 1):
            self.weight()
            self.backward(0, split=True)
        for _ in range(h + 1):
            self.weight()


def dual_pipe_v(stages: int, microbatches: int, split: bool = True) -> Table:
    """DualPipeV ("cut in half"): DualPipe on a V, without a second copy of the parameters. Peak p + 1/2 microbatches.

    split=False: as published, whole backwards inside the pairs. split=True: there too B comes apart from its W, which
    follows it, so that the gradient leaves early. Built for at least 2p microbatches; a surplus is deleted.
    """
    p, m = stages, max(microbatches, 2 * stages)
    rows = []
    for r in range(p):
        row = _Row(False, (0, 0))
        row.steps(p, r, m - 2 * p + r + 1, r == p - 1)
        rows.append(row)
    table = Table("dualpipe-v", p, 2, m, "v", tuple(tuple(row.actions) for row in rows), _pairs(rows)).only(microbatches)
    return table.split_backward() if split else table


def dual_pipe(stages: int, microbatches: int, split: bool = True) -> Table:
    """DualPipe: microbatches enter at both ends of two copies of the model. Peak p + 1 microbatches, twice the
    parameters.

    Even stages, even microbatches, at least two per stage.
    """
    p, m = stages, microbatches
    if p % 2 or m % 2 or m < 2 * p:
        raise UserError(
            f"dualpipe: needs an even number of stages and an even number of microbatches, at least twice the stages; "
            f"{p} stages and {m} microbatches are not"
        )
    rows = []
    for r in range(p):
        h = min(r, p - 1 - r)
        row = _Row(r >= p // 2, (0, m // 2))
        row.steps(p // 2, h, m // 2 - p + h + 1, h == p // 2 - 1)
        rows.append(row)
    table = Table("dualpipe", p, 2, m, "bidirectional", tuple(tuple(row.actions) for row in rows), _pairs(rows))
    return table.split_backward() if split else table


def _pairs(rows: list[_Row]) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(row.pairs) for row in rows)
