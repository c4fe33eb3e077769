"""The `schedule` command: describe, draw, compare and search schedules. Plain functions; no accelerator library is imported."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.schedule.boxes import Picture, of_simulation, of_ticks
from parallel.schedule.draw import FORMATS, ascii_timeline, legend
from parallel.schedule.draw import draw as draw_picture
from parallel.schedule.html import save_html
from parallel.schedule.registry import SCHEDULES, make
from parallel.schedule.search import OBJECTIVES, lower_bound, search
from parallel.schedule.simulate import simulate
from parallel.schedule.table import Table, check_sizes
from parallel.schedule.table_csv import save
from parallel.schedule.tick_search import search_ticks
from parallel.schedule.ticks import best_ticks
from parallel.schedule.trace import save_trace

IDLE = ("skip", "compute")
FLAGS = (  # (name, default, placeholder, help)
    ("name", "interleaved", "NAME", "a schedule of --list, or a CSV file"),
    ("stages", 4, "P", "pipeline ranks"),
    ("microbatches", 8, "M", "microbatches in one step"),
    ("chunks", 0, "V", "chunks per rank; 0: the schedule's own; for auto and --compare the most"),
    ("group", 0, "G", "microbatches in a group of an interleaved schedule; 0: its own"),
    ("costs", "1,1,1", "F,B,W", "times of one full rank and one microbatch; B is the input gradient only"),
    ("comm", 0.0, "C", "delay between two ranks"),
    ("memory", 0.0, "N", "microbatches of one full rank that a rank may hold; 0: no limit, or the schedule's own"),
    ("objective", "makespan", "WHAT", "what auto minimises: makespan, rank_span, or ticks in idle mode skip or compute"),
    ("compare", False, "", "all schedules that fit, ranked for the asynchronous and for the tick machine"),
    ("list", False, "", "the names of all schedules and their constraints"),
    ("ticks", False, "", "draw and trace the ticks of the executor instead of the asynchronous machine"),
    ("draw", "", "FILE", "draw into a .svg, .png or .html file"),
    ("trace", "", "FILE", "write a Chrome trace (JSON)"),
    ("csv", "", "FILE", "write the table as CSV in PyTorch's compute-only notation"),
)

DEFAULTS = {name: default for name, default, *_ in FLAGS}
LARGEST = 1e9  # of a time, in any unit; the smallest but 0 is its inverse
LONG = 10_000  # forwards above which a call takes long enough to say what it does


def run(options: Mapping[str, Any] | Any) -> tuple[Any, str]:
    """(document for --json, text) of one call; options: the FLAGS as a mapping or as attributes."""
    given = options if isinstance(options, Mapping) else vars(options)
    return schedule(**{name: given[name] for name in DEFAULTS if name in given})


def _only(given: Mapping[str, Any], what: str, *used: str) -> None:
    """Refuse the flags that --what would not look at."""
    others = [flag for flag, value in given.items() if flag not in (what, *used) and value != DEFAULTS[flag]]
    if others:
        raise UserError(f"--{what} does not look at --{', --'.join(others)}: leave {'it' if len(others) == 1 else 'them'} out")


def _tell(what: str, forwards: int) -> None:
    """Say on stderr what comes, when it may take long."""
    if forwards > LONG:
        print(f"{what} ...", file=sys.stderr, flush=True)


def schedule(
    name: str = "interleaved",
    stages: int = 4,
    microbatches: int = 8,
    chunks: int = 0,
    group: int = 0,
    costs: str | Sequence[float] = "1,1,1",
    comm: float = 0.0,
    memory: float = 0.0,
    objective: str = "makespan",
    compare: bool = False,
    list: bool = False,
    ticks: bool = False,
    draw: str = "",
    trace: str = "",
    csv: str = "",
    width: int = 0,
) -> tuple[Any, str]:
    """Describe one schedule, or compare or list all: (document, text). width: columns of the timeline, 0 for the terminal's.

    Raises UserError for a combination that the schedule cannot do, and for file names of an unknown kind before writing any.
    """
    given = {flag: value for flag, value in locals().items() if flag in DEFAULTS}
    if list:
        _only(given, "list")
        return listing()
    times = parse_costs(costs)
    if not 0 <= comm <= LARGEST:
        raise UserError(f"comm is a time of at least 0 and at most {LARGEST:g}, not {comm:g}")
    check_sizes(stages, microbatches, chunks, group, memory)
    if compare:
        _only(given, "compare", "stages", "microbatches", "chunks", "costs", "comm", "memory")
        return comparison(stages, microbatches, times, comm, chunks, memory, width)
    if draw and not draw.endswith((*FORMATS, ".html")):
        raise UserError(f"cannot draw {draw!r}: the name ends in one of {', '.join((*FORMATS, '.html'))}")
    document: dict[str, Any] = {}
    _tell(f"making {name}", stages * microbatches * (chunks or 2))
    if name == "auto":
        if group:
            raise UserError("auto: chooses its groups of microbatches itself; leave group at 0")
        table, document = automatic(stages, microbatches, times, comm, memory, chunks, objective)
    else:
        if objective != DEFAULTS["objective"]:
            raise UserError(f"{name}: has an order of its own; --objective={objective} is for --name=auto")
        table = make(name, stages, microbatches, chunks, group, "", times, comm, memory).validate(memory)
    _tell("timing it and packing it into ticks", stages * microbatches * table.chunks)
    document = facts(table, times, comm) | document
    lines = summary(document)
    picture = _picture(table, times, comm, ticks)
    written = []
    for file in filter(None, (draw, trace, csv)):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    if csv:  # first, as not every table can be written
        written.append(save(table, csv))
    if draw:
        written.append(save_html(picture, draw) if draw.endswith(".html") else draw_picture(picture, draw))
    if trace:
        written.append(save_trace(picture, trace))
    shown = best_ticks(table, times) if ticks else simulate(table, times, comm)
    columns = width or _columns()
    lines = [part for line in lines for part in textwrap.wrap(line, columns, subsequent_indent=" " * 16)]
    lines += ["", ascii_timeline(shown, columns, times), *textwrap.wrap(legend(table), columns)]
    lines += [f"wrote {path}" for path in written]
    return document, "\n".join(lines)


def parse_costs(costs: str | Sequence[float]) -> tuple[float, float, float]:
    """Three times from '1,1,0.65' or a sequence. Raises UserError."""
    parts = costs.split(",") if isinstance(costs, str) else costs
    try:
        times = tuple(float(x) for x in parts)
    except (TypeError, ValueError):
        times = ()
    if len(times) != 3 or not any(times) or not all(t == 0 or 1 / LARGEST <= t <= LARGEST for t in times):
        raise UserError(
            f"costs are three times F,B,W like 1,1,0.65, each 0 or from {1 / LARGEST:g} to {LARGEST:g}, not all 0; "
            f"not {costs!r}"
        )
    return times


def facts(table: Table, costs: tuple[float, float, float], comm: float = 0.0) -> dict[str, Any]:
    """The figures of one table, by the names that --json prints.

    Times have the unit of the costs, memory is in microbatches of one full rank. ticks: of the executor, None for schedules
    that it does not run; tick_makespan in idle mode skip, tick_makespan_compute in idle mode compute, each in its better shape.
    """
    run = simulate(table, costs, comm)
    out: dict[str, Any] = {
        "name": table.name,
        "stages": table.stages,
        "microbatches": table.microbatches,
        "chunks": table.chunks,
        "makespan": run.makespan,
        "rank_span": run.rank_span,
        "bubble_makespan": run.bubble_makespan,
        "bubble_rank_span": run.bubble_rank_span,
        "peak_activations": run.peak_activations,
        "residual_peak": run.residual_peak,
        "messages_per_rank": run.messages_per_rank,
    }
    if table.placement not in ("linear", "loop", "v"):
        keys = ("shape", "makespan", "makespan_compute", "peak_activations", "bubble")
        return out | {f"tick_{key}": None for key in keys}
    skip, compute = best_ticks(table, costs), best_ticks(table, costs, "compute")
    cost = skip.cost(*costs)
    return out | {
        "tick_shape": skip.shape,
        "tick_makespan": cost,
        "tick_makespan_compute": compute.cost(*costs, idle="compute"),
        "tick_peak_activations": skip.peak_activations,
        "tick_bubble": 1 - run.ideal / cost,
    }


def automatic(
    stages: int, microbatches: int, costs: tuple[float, float, float], comm: float, memory: float, chunks: int, objective: str
) -> tuple[Table, dict[str, Any]]:
    """The searched table, and what to say about it: the objective, its value, the lower bound and the best named schedule."""
    if objective in OBJECTIVES:
        found = search(stages, microbatches, costs, comm, memory, chunks, objective)
        table = found.table
    elif objective in IDLE:
        found = search_ticks(stages, microbatches, costs, memory, chunks, objective)
        table = found.ticks.table
    else:
        raise UserError(f"auto minimises one of {', '.join((*OBJECTIVES, *IDLE))}, not {objective!r}")
    best = min(found.tried, key=found.tried.get, default="")
    return table, {
        "objective": objective,
        "value": found.value,
        "lower_bound": found.bound,
        "gap": found.gap,
        "best_named": best,
        "best_named_value": found.tried.get(best),
    }


def summary(d: Mapping[str, Any]) -> list[str]:
    """A table's figures in a few lines."""
    each = lambda values: f" (per rank: {' '.join(f'{x:g}' for x in values)})" if len(set(values)) > 1 else " on every rank"
    worst = lambda values: f"{max(values):g}{each(values)}"
    lines = [
        f"{d['name']}: {d['stages']} stages x {d['chunks']} chunks, {d['microbatches']} microbatches",
        f"  makespan      {d['makespan']:.6g}   bubble {d['bubble_makespan']:.2%}   (a step that ends with one global norm)",
        f"  rank span     {d['rank_span']:.6g}   bubble {d['bubble_rank_span']:.2%}   (ranks start and end on their own)",
        f"  activations   microbatches: {worst(d['peak_activations'])}",
        f"  B to W        microbatches: {worst(d['residual_peak'])}",
        f"  messages      sent in one step: {worst(d['messages_per_rank'])}",
    ]
    if d["tick_shape"]:
        lines += [
            f"  ticks         {d['tick_makespan']:.6g} in {d['tick_shape']} with idle slots skipped (bubble "
            f"{d['tick_bubble']:.2%}), {d['tick_makespan_compute']:.6g} with idle slots computed",
            f"  in ticks      microbatches: {worst(d['tick_peak_activations'])}",
        ]
    else:
        lines.append("  ticks         not executed: for simulation and drawing")
    if "objective" in d:
        lines.append(
            f"  search        {d['objective']} {d['value']:.6g}, lower bound {d['lower_bound']:.6g} ({d['gap']:.2%} above it); "
            f"best named: {d['best_named']} {d['best_named_value'] or 0:.6g}"
        )
    return lines


def listing() -> tuple[list[dict[str, Any]], str]:
    """Names and constraints of all schedules."""
    rows = [
        {"name": n, "chunks": s.chunks, "other_chunks": s.free_chunks, "executable": s.executable, "rule": s.rule}
        for n, s in SCHEDULES.items()
    ]
    wide = max(len(r["name"]) for r in rows)
    chunks = lambda r: f"{r['chunks']} chunk{'s' * (r['chunks'] > 1)}{' or other' * r['other_chunks']}"
    text = [f"{r['name']:<{wide}}  {chunks(r):<18}  {r['rule']}" for r in rows]
    return rows, "\n".join([*text, f"{'FILE.csv':<{wide}}  {'as it says':<18}  PyTorch's compute-only notation"])


def comparison(
    stages: int,
    microbatches: int,
    costs: tuple[float, float, float],
    comm: float = 0.0,
    chunks: int = 0,
    memory: float = 0.0,
    width: int = 0,
) -> tuple[list[dict[str, Any]], str]:
    """All schedules that fit, the shortest makespan first, and which are slower than interleaved on the tick machine.

    chunks: for the schedules that take any number. memory: leave out what holds more (0: nothing). width: of the text.
    """
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    for name, spec in SCHEDULES.items():
        if name == "auto":
            continue
        forms = ("",) if spec.split or not spec.executable else ("whole", "split")
        for backward in forms:
            _tell(f"{name} {backward}".rstrip(), stages * microbatches * (chunks or 2))
            try:
                table = make(name, stages, microbatches, chunks if spec.free_chunks else 0, 0, backward, costs, comm)
            except UserError as error:
                refused.append(str(error))
                break
            row = facts(table, costs, comm) | {"backward": backward or ("split" if spec.split else "whole")}
            if memory and max(row["peak_activations"]) > memory + 1e-6:
                refused.append(f"{name}: holds {max(row['peak_activations']):g} microbatches, more than {memory:g}")
                break
            rows.append(row)
    rows.sort(key=lambda d: (d["makespan"], max(d["peak_activations"])))
    ticked = sorted((d for d in rows if d["tick_makespan"] is not None), key=lambda d: d["tick_makespan"])
    for i, d in enumerate(rows):
        d["rank_asynchronous"], d["rank_ticks"] = i + 1, next((k + 1 for k, t in enumerate(ticked) if t is d), None)
    columns = width or _columns()
    label = lambda d: d["name"] + (" (W deferred)" if d["backward"] == "split" and not SCHEDULES[d["name"]].split else "")
    wide = max(map(len, map(label, rows)), default=8)
    lines = [
        f"{stages} stages, {microbatches} microbatches, F,B,W = {','.join(f'{x:g}' for x in costs)}, delay {comm:g}",
        f"{'':<{wide}}         {'asynchronous machine':^42} | tick machine, idle slots skipped / computed",
        f"{'schedule':<{wide}} chunks   # makespan  bubble  rank span   peak |   #   skipped shape   peak  computed",
    ]
    for d in rows:
        line = (
            f"{label(d):<{wide}} {d['chunks']:>6} {d['rank_asynchronous']:>3} {d['makespan']:>8.5g}"
            f"  {d['bubble_makespan']:>6.1%}  {d['rank_span']:>9.5g} {max(d['peak_activations']):>6.4g} |"
        )
        if d["tick_makespan"] is None:
            line += "   not executed"
        else:
            line += (
                f" {d['rank_ticks']:>3} {d['tick_makespan']:>9.5g} {d['tick_shape']:<6} {max(d['tick_peak_activations']):>5.4g}"
                f" {d['tick_makespan_compute']:>9.5g}"
            )
        lines.append(line)
    bound = lower_bound(stages, microbatches, costs, comm, max((d["chunks"] for d in rows), default=1))
    notes = [
        "#: place by makespan, and by ticks with idle slots skipped. peak: microbatches of a full rank that the fullest rank "
        f"holds. No table with these chunks and one copy of the model has a makespan below {bound:.5g}."
    ]
    for key, mode in (("tick_makespan", "skipped"), ("tick_makespan_compute", "computed")):
        ours = min((d for d in ticked if d["name"] == "interleaved"), key=lambda d: d[key], default=None)
        slow = sorted((d for d in ticked if ours and d[key] > ours[key] * 1.0001), key=lambda d: d[key])
        if slow:
            notes.append(
                f"In ticks with idle slots {mode}, {label(ours)} takes {ours[key]:.5g}; slower than that: "
                + ", ".join(f"{label(d)} +{d[key] / ours[key] - 1:.1%}" for d in slow)
            )
    notes += [f"left out: {why}" for why in refused]
    for note in notes:
        lines += textwrap.wrap(note, columns, subsequent_indent="  ", break_on_hyphens=False)
    return rows, "\n".join(lines)


def _columns() -> int:
    """Width of the terminal."""
    return shutil.get_terminal_size((100, 24)).columns


def _picture(table: Table, costs, comm: float, ticks: bool) -> Picture:
    return of_ticks(best_ticks(table, costs), costs) if ticks else of_simulation(simulate(table, costs, comm))
