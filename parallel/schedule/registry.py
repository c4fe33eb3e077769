"""All schedules by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable

from parallel.errors import UserError
from parallel.schedule import adaptive, dual_pipe, interleaved, one_f_one_b, table_csv, v_shapes, waves, zero_bubble
from parallel.schedule.order import group_sizes, groups
from parallel.schedule.table import Action, Table, check_sizes, stage_of

Costs = tuple[float, float, float]
WHOLE_GROUPS = "a group has at least as many microbatches as there are stages"


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a schedule is built for. memory: microbatches a rank may hold, 0 for the schedule's own. idle: see `make`."""

    stages: int
    microbatches: int
    chunks: int
    group: int
    split: bool = True
    costs: Costs = (1.0, 1.0, 1.0)
    comm: float = 0.0
    memory: float = 0.0
    idle: str = ""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A named schedule.

    build: Ask -> Table. rule: its constraints in a few words. chunks: the default number of chunks a rank; free_chunks:
    others work. grouped: knows groups of microbatches. split: in its own form W is apart from B. deferred: published with a
    whole backward, better with W apart and deferred. executable: the trainer can run it. timed: its order depends on costs.
    limits: Ask -> None refuses what breaks the rule, where building the table would take long.
    """

    build: Callable[[Ask], Table]
    rule: str = "any stages and microbatches"
    chunks: int = 1
    free_chunks: bool = False
    grouped: bool = False
    split: bool = True
    deferred: bool = False
    executable: bool = True
    timed: bool = False
    limits: Callable[[Ask], None] | None = None

    def check(self, ask: Ask) -> None:
        """Refuse what breaks the rule, without building a large table: no rule depends on the number of microbatches."""
        if self.limits is not None:
            self.limits(ask)
        else:
            self.build(dataclasses.replace(ask, microbatches=1))


def _zb(name: str, limit: float) -> Callable[[Ask], Table]:
    return lambda a: zero_bubble.zb_automatic(
        name, a.stages, a.microbatches, a.costs, a.comm, a.memory / a.stages if a.memory else limit
    )


def _looped(build: Callable[[Ask], Table], groups: str = "", split: bool = True) -> Schedule:
    """A schedule on a loop, for any chunks. groups: their rule, empty when it knows none. Without `split` it is deferred."""
    rule = f"any chunks; {groups}" if groups else "any chunks"
    return Schedule(build, rule, chunks=2, free_chunks=True, grouped=bool(groups), split=split, deferred=not split)


def _auto(a: Ask) -> Table:
    # they try the others: imported late
    from parallel.schedule.search import search
    from parallel.schedule.tick_search import search_ticks

    if a.idle:
        return search_ticks(a.stages, a.microbatches, a.costs, a.memory, a.chunks, a.idle).ticks.table
    return search(a.stages, a.microbatches, a.costs, a.comm, a.memory, a.chunks).table


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(lambda a: one_f_one_b.gpipe(a.stages, a.microbatches, a.split), split=False),
    "1f1b": Schedule(lambda a: one_f_one_b.one_f_one_b(a.stages, a.microbatches, a.split), split=False, deferred=True),
    "eager-1f1b": Schedule(
        lambda a: one_f_one_b.eager_one_f_one_b(a.stages, a.microbatches, a.split), split=False, deferred=True
    ),
    "interleaved": _looped(
        lambda a: interleaved.interleaved(a.stages, a.microbatches, a.chunks, a.group, a.split), WHOLE_GROUPS, split=False
    ),
    "looped-bfs": _looped(lambda a: interleaved.looped_bfs(a.stages, a.microbatches, a.chunks, a.split), split=False),
    "gis": _looped(lambda a: interleaved.gis(a.stages, a.microbatches, a.chunks, a.group), WHOLE_GROUPS),
    "gis-h": _looped(
        lambda a: interleaved.gis_h(a.stages, a.microbatches, a.chunks, a.group), "a group of half of the stages to all"
    ),
    "zb-h1": Schedule(lambda a: zero_bubble.zb_h1(a.stages, a.microbatches)),
    "zb-h2": Schedule(lambda a: zero_bubble.zb_h2(a.stages, a.microbatches)),
    "zb-1p": Schedule(_zb("zb-1p", 1), timed=True),
    "zb-2p": Schedule(_zb("zb-2p", 2), timed=True),
    "zb-v": Schedule(lambda a: v_shapes.zb_v(a.stages, a.microbatches), "two chunks", chunks=2),
    "v-half": Schedule(lambda a: v_shapes.v_half(a.stages, a.microbatches), "two chunks", chunks=2),
    "v-min": Schedule(lambda a: v_shapes.v_min(a.stages, a.microbatches), "two chunks", chunks=2),
    "adaptive-v": Schedule(
        lambda a: adaptive.adaptive_v(a.stages, a.microbatches, a.costs, a.comm, a.memory),
        "two chunks; memory for v-min at least",
        chunks=2,
        timed=True,
        limits=lambda a: adaptive.check_memory(a.stages, a.microbatches, a.memory),
    ),
    "dualpipe-v": Schedule(lambda a: dual_pipe.dual_pipe_v(a.stages, a.microbatches), "two chunks", chunks=2),
    "dualpipe": Schedule(
        lambda a: dual_pipe.dual_pipe(a.stages, a.microbatches),
        "two copies of the model; even stages, even microbatches, at least two per stage; not executed",
        chunks=2,
        executable=False,
    ),
    "chimera": Schedule(
        lambda a: waves.chimera(a.stages, a.microbatches),
        "two copies of the model; even stages, even microbatches; not executed",
        chunks=2,
        split=False,
        executable=False,
    ),
    "hanayo": Schedule(
        lambda a: waves.hanayo(a.stages, a.microbatches, a.chunks),
        "an even number of chunks, two for each wave; not executed",
        chunks=2,
        free_chunks=True,
        split=False,
        executable=False,
    ),
    "auto": Schedule(
        _auto,
        "the best table that the search finds; chunks: the most it may use",
        chunks=2,
        free_chunks=True,
        timed=True,
        limits=lambda a: None,
    ),
}


def make(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 0,
    group: int = 0,
    backward: str = "",
    costs: Costs = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory: float = 0.0,
    idle: str = "",
) -> Table:
    """The table of a named schedule, or of a CSV file, for `stages` pipeline ranks and `microbatches`.

    chunks, group: 0 for the schedule's own. backward: 'whole' (BW), 'split' (W apart and deferred) or '' for the
    schedule's own. costs, comm: times of F, B, W of one full rank and the delay between ranks, for schedules that are
    fitted to them. memory: microbatches that a rank may hold, for those that know a limit (0: their own). idle: the
    executor's idle mode, for which `auto` then searches ticks ('': the asynchronous machine). Raises
    UserError that names the schedule's rule when the combination is impossible.
    """
    if backward not in ("", "whole", "split"):
        raise UserError(f"{name}: backward is 'whole' or 'split', not {backward!r}")
    spec, ask = _asked(name, stages, microbatches, chunks, group, memory)
    split = backward == "split" or (not backward and spec.split)
    table = spec.build(dataclasses.replace(ask, split=split, costs=tuple(costs), comm=comm, idle=idle))
    if backward == "split":
        table = table.split_backward()
    return table.join_backward() if backward == "whole" else table


def check_executable(name: str, stages: int, microbatches: int, chunks: int = 0, group: int = 0, memory: float = 0.0) -> None:
    """Refuse what the trainer cannot run, quicker than by making the table: unknown names, schedules that are for drawing,
    impossible chunks, groups or memory, wrong files. Raises UserError that names the rule.
    """
    spec, ask = _asked(name, stages, microbatches, chunks, group, memory)
    if not spec.executable:
        others = ", ".join(other for other, s in SCHEDULES.items() if s.executable)
        raise UserError(f"{name}: is for simulation and drawing, it is not executed; these are: {others}, and FILE.csv")
    spec.check(ask)


def _asked(name: str, stages: int, microbatches: int, chunks: int, group: int, memory: float) -> tuple[Schedule, Ask]:
    """The schedule and what it is asked for; refuses what needs no table to be refused."""
    check_sizes(stages, microbatches, chunks, group, memory)
    if name.endswith(".csv"):
        table = table_csv.load(name)
        have, want = (table.stages, table.microbatches), (stages, microbatches)
        if have != want or chunks not in (0, table.chunks):
            raise UserError(
                f"{name}: holds {have[0]} ranks x {table.chunks} chunks and {have[1]} microbatches; "
                f"asked were {want[0]} ranks{f' x {chunks} chunks' if chunks else ''} and {want[1]} microbatches"
            )
        spec = Schedule(lambda a: table, "as the file says", table.chunks)
    else:
        spec = find(name)
    if chunks not in (0, spec.chunks) and not spec.free_chunks:
        many = f"{spec.chunks} chunk{'s' * (spec.chunks > 1)}"
        raise UserError(f"{name}: has {many} a rank, not {chunks} (rule: {spec.rule})")
    if group and not spec.grouped:
        raise UserError(f"{name}: has no groups of microbatches; leave group at 0 (rule: {spec.rule})")
    return spec, Ask(stages, microbatches, chunks or spec.chunks, group, memory=memory)


def find(name: str) -> Schedule:
    """The schedule of that name; raises UserError with the nearest one."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(f"there is no schedule {name!r}{hint}; known are {', '.join(SCHEDULES)}, and FILE.csv")
    return SCHEDULES[name]


def make_forward(placement: str, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """A forward-only table (evaluation) for a placement: linear, loop or v."""
    p, m, v = stages, microbatches, chunks
    if placement == "linear":
        ranks = one_f_one_b.forward(p, m)
    elif placement == "loop":
        ranks = (tuple(Action("F", *unit) for unit in groups(group_sizes(m, p, p), v)),) * p
    elif placement == "v":  # a microbatch enters every other step; it comes back to a rank at the other parity
        units = [(c, i) for c in range(v) for i in range(m)]
        due = lambda r, c, i: 2 * i + stage_of(placement, p, r, c)
        ranks = tuple(tuple(Action("F", *u) for u in sorted(units, key=lambda u, r=r: due(r, *u))) for r in range(p))
    else:
        raise UserError(f"no forward-only table for a {placement} placement; use linear, loop or v")
    return Table("forward", p, v, m, placement, ranks, forward_only=True)
