"""The pattern behind most schedules: warm-up forwards, then forward and backward in turn, then the backwards that are
left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from parallel.schedule.table import Action


def in_turn(
    forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], warmup: int, lag: int | None
) -> tuple[Action, ...]:
    """One rank's list: `warmup` forwards, then (forward, backward) until the forwards end, then the remaining
    backwards.

    forward, backward: (chunk, microbatch) in order. lag: None for whole backwards (BW); else the oldest waiting W
    follows every B but the first `lag`, and the W that are left come last.
    """
    todo, waiting, rank = deque(forward), deque(), []
    for _ in range(min(warmup, len(todo))):
        rank.append(Action("F", *todo.popleft()))
    for b, unit in enumerate(backward):
        if todo:
            rank.append(Action("F", *todo.popleft()))
        if lag is None:
            rank.append(Action("BW", *unit))
            continue
        rank.append(Action("B", *unit))
        waiting.append(unit)
        if b >= lag:
            rank.append(Action("W", *waiting.popleft()))
    return tuple(rank + [Action("W", *unit) for unit in waiting])


def group_sizes(microbatches: int, group: int, least: int) -> list[int]:
    """Groups of `group`, the last one short when it has at least `least`; otherwise as many groups, nearly equal and
    larger.
    """
    full, rest = divmod(microbatches, group)
    if full and (rest == 0 or rest >= least):
        return [group] * full + [rest] * (rest > 0)
    n = max(1, full)
    return [microbatches // n + (i < microbatches % n) for i in range(n)]


def groups(sizes: Sequence[int], chunks: int, reverse: bool = False) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the interleaved order: a group of microbatches on chunk 0, the same on chunk 1, ...; next
    group.

    reverse: the backward's order, chunks from last to first (the microbatches still ascend).
    """
    order = range(chunks - 1, -1, -1) if reverse else range(chunks)
    ends = list(accumulate(sizes))
    return [(c, i) for size, end in zip(sizes, ends) for c in order for i in range(end - size, end)]
