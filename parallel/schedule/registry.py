"""All schedules by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable

from parallel.errors import UserError
from parallel.schedule import interleaved, one_f_one_b
from parallel.schedule.order import group_sizes, groups
from parallel.schedule.table import Action, Table, stage_of


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A named schedule: how it is built and what it asks for.

    build: (stages, microbatches, chunks, group, split) -> Table. chunks: the default. fixed_chunks: no other number
    works. split: whether its own form has W apart. rule: its constraints in a few words. executable: whether the
    trainer can run it.
    """

    build: Callable[[int, int, int, int, bool], Table]
    rule: str
    chunks: int = 1
    fixed_chunks: bool = True
    grouped: bool = False
    split: bool = False
    executable: bool = True


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(lambda p, m, v, g, split: one_f_one_b.gpipe(p, m, split), "any stages and microbatches"),
    "1f1b": Schedule(lambda p, m, v, g, split: one_f_one_b.one_f_one_b(p, m, split), "any stages and microbatches"),
    "eager-1f1b": Schedule(
        lambda p, m, v, g, split: one_f_one_b.eager_one_f_one_b(p, m, split), "any stages and microbatches"
    ),
    "interleaved": Schedule(
        interleaved.interleaved, "any chunks; group at least the stages", chunks=2, fixed_chunks=False, grouped=True
    ),
}


def make(name: str, stages: int, microbatches: int, chunks: int = 0, group: int = 0, backward: str = "") -> Table:
    """The table of a named schedule for `stages` pipeline ranks and `microbatches`.

    chunks, group: 0 for the schedule's own. backward: 'whole' (BW), 'split' (W apart and deferred) or '' for the
    schedule's own. Raises UserError that names the schedule's rule when the combination is impossible.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, 1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise UserError(f"there is no schedule {name!r}{hint} Known: {', '.join(SCHEDULES)}")
    spec = SCHEDULES[name]
    if stages < 1 or microbatches < 1 or chunks < 0 or group < 0:
        raise UserError(
            f"{name}: stages and microbatches are at least 1, chunks and group at least 0 (0: the schedule's own)"
        )
    if backward not in ("", "whole", "split"):
        raise UserError(f"{name}: backward is 'whole' or 'split', not {backward!r}")
    if chunks not in (0, spec.chunks) and spec.fixed_chunks:
        raise UserError(
            f"{name}: has {spec.chunks} chunk{'s' * (spec.chunks > 1)} a rank, not {chunks} (rule: {spec.rule})"
        )
    if group and not spec.grouped:
        raise UserError(f"{name}: has no groups of microbatches; leave group at 0 (rule: {spec.rule})")
    split = backward == "split" or (not backward and spec.split)
    table = spec.build(stages, microbatches, chunks or spec.chunks, group, split)
    return table.join_backward() if backward == "whole" else table


def make_forward(placement: str, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """A forward-only table (evaluation) for a placement: linear, loop or v."""
    p, m, v = stages, microbatches, chunks
    if placement == "linear":
        ranks = one_f_one_b.forward(p, m)
    elif placement == "loop":
        order = tuple(Action("F", *unit) for unit in groups(group_sizes(m, p, p), v))
        ranks = (order,) * p
    elif placement == "v":  # a microbatch enters every other step; it comes back to a rank at the other parity
        units = [(c, i) for c in range(v) for i in range(m)]
        due = lambda r, c, i: 2 * i + stage_of(placement, p, v, r, c)
        ranks = tuple(tuple(Action("F", *u) for u in sorted(units, key=lambda u: due(r, *u))) for r in range(p))
    else:
        raise UserError(f"no forward-only table for a {placement} placement; use linear, loop or v")
    return Table("forward", p, v, m, placement, ranks, forward_only=True)
