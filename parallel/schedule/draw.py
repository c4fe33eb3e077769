"""Schedules to look at: PNG or SVG through matplotlib, and text for a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from parallel.errors import UserError
from parallel.schedule.boxes import WORDS, Picture, colour, of_simulation, of_ticks
from parallel.schedule.simulate import Simulation, simulate
from parallel.schedule.table import Table
from parallel.schedule.ticks import TickTable

FORMATS = (".svg", ".png")
IDLE = "·"


def draw_ticks(
    tick_table: TickTable,
    path: str | os.PathLike,
    step_time_s: float | None = None,
    title: str = "",
    costs: Sequence[float] = (1, 1, 1),
    idle: str = "skip",
) -> str:
    """Draw the ticks that a step runs, to scale, into a .png or .svg file; returns the path.

    step_time_s: a measured time of the step; the axis is then in ms, the ticks sharing it as `costs` (F, B, W) say.
    """
    picture = of_ticks(tick_table, costs, idle)
    if step_time_s is not None:
        picture = picture.scaled(1000 * step_time_s / picture.end)
    return draw(picture, path, title, "ms" if step_time_s is not None else "")


def draw(picture: Picture | Simulation, path: str | os.PathLike, title: str = "", unit: str = "") -> str:
    """Draw a picture or a simulation into a .png or .svg file; returns the path. unit: of the time axis."""
    picture = of_simulation(picture) if isinstance(picture, Simulation) else picture
    return draw_over({title or heading(picture): picture}, path, unit)


def draw_over(pictures: Mapping[str, Picture], path: str | os.PathLike, unit: str = "") -> str:
    """Draw pictures of one table below one another on one time axis, each under its title, into a .png or .svg file."""
    path = os.fspath(path)
    if not path.endswith(FORMATS):
        raise UserError(f"cannot draw {path!r}: the name ends in one of {', '.join(FORMATS)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    table = next(iter(pictures.values())).table
    end = max(picture.end for picture in pictures.values())
    units = max(picture.end / picture.unit for picture in pictures.values())  # boxes side by side
    width = min(max(9.0, 0.125 * units), 44.0)  # inches: two digits fit a box, as long as the page is not too wide
    rank = 0.34 if table.stages <= 16 else 0.24  # height of a rank
    big = min(max(1.0, width / 20), 2.0)  # text around the picture: a wide page is looked at from farther away
    panel = rank * table.stages + 0.75 * big  # with title, axis and labels
    tall = panel * len(pictures) + 0.45 * big
    figure = Figure(figsize=(width, tall), dpi=150 if width < 30 else 110)
    FigureCanvasAgg(figure)
    left, room = 0.62 * big, width - 1.0 * big
    for i, (title, picture) in enumerate(pictures.items()):
        bottom = (len(pictures) - 1 - i) * panel + 0.52 * big
        axes = figure.add_axes((left / width, bottom / tall, room / width, rank * table.stages / tall))
        _paint(axes, picture, room * 72 / end, rank)
        axes.set_xlim(0, end)
        axes.tick_params(axis="x", labelsize=8 * big)
        axes.set_ylabel("rank", size=9 * big)
        axes.set_title(title, size=10 * big, loc="left", pad=(20 if i == 0 else 6) * big)
    axes.set_xlabel(f"time ({unit})" if unit else "time, in the unit of the costs", size=9 * big)

    kinds = [k for k in WORDS if k == "F" or not table.forward_only]
    keys = [
        Patch(facecolor=colour(k, 0, table.chunks), edgecolor="#444444", linewidth=0.4, label=f"{k} {WORDS[k]}") for k in kinds
    ]
    keys += [Patch(facecolor="none", edgecolor="none", label="darker: later chunk")] * (table.chunks > 1)
    figure.legend(
        handles=keys,
        loc="upper left",
        bbox_to_anchor=((left - 0.12) / width, 1 - 0.36 * big / tall),
        ncols=len(keys),
        frameon=False,
        fontsize=7.5 * big,
        columnspacing=1.1,
        handlelength=1.2,
        handletextpad=0.4,
    )
    figure.savefig(path, facecolor="white")
    return path


def _paint(axes: Any, picture: Picture, points: float, rank: float) -> None:
    """The boxes of a picture; points: of one unit of time; rank: height of a rank in inches."""
    from matplotlib.collections import PolyCollection

    table = picture.table
    groups: dict[tuple[str, int], list] = {}
    for b in picture.boxes:
        x, y, x2, y2 = b.start, b.rank - 0.46, b.end, b.rank + 0.46
        groups.setdefault((b.kind, b.chunk), []).append(((x, y), (x2, y), (x2, y2), (x, y2)))
    edge = 0.4 if picture.unit * points > 4 else 0.0
    for (kind, chunk), corners in groups.items():
        face = colour(kind, chunk, table.chunks)
        line = "#444444" if edge else face
        axes.add_collection(PolyCollection(corners, facecolors=face, edgecolors=line, linewidths=edge, clip_on=False))
    for b in picture.boxes:
        room, text = (b.end - b.start) * points, str(b.microbatch)
        size = min(7.5, room / (0.62 * len(text) + 0.25), rank * 72 * 0.62)
        if size >= 4:  # smaller cannot be read
            ink = "white" if b.kind == "F" else "black"
            middle = (b.start + b.end) / 2
            axes.text(middle, b.rank, text, size=size, ha="center", va="center_baseline", color=ink)
    if picture.lines and picture.end / len(picture.lines) * points > 6:
        axes.vlines(picture.lines[1:], -0.5, table.stages - 0.5, colors="#999999", linewidths=0.5, zorder=0)
    axes.set_ylim(table.stages - 0.5, -0.5)
    axes.set_yticks(range(table.stages), [str(r) for r in range(table.stages)], size=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def heading(picture: Picture) -> str:
    """One line that says what is drawn."""
    t = picture.table
    count = lambda n, what: f"{n} {what}{'es' if what.endswith('ch') else 's'}" if n != 1 else f"1 {what}"
    chunks = f", {t.chunks} chunks" if t.chunks > 1 else ""
    sizes = f"{count(t.stages, 'rank')}{chunks}, {count(t.microbatches, 'microbatch')}"
    return f"{t.name}: {sizes}; {picture.note}; idle {picture.idle:.1%}"


def ascii_timeline(table: Table | TickTable | Simulation, width: int = 100, costs: Sequence[float] = (1, 1, 1)) -> str:
    """A timeline of `width` columns, one line a rank.

    F, B, W for the first, third, ... chunk, f, b, w for the others; with the microbatch's number where it fits; a dot
    is idle. A Table is simulated on the asynchronous machine with `costs`.
    """
    if isinstance(table, Table):
        table = simulate(table, tuple(costs))
    picture = of_simulation(table) if isinstance(table, Simulation) else of_ticks(table, costs)
    stages = picture.table.stages
    label = len(str(stages - 1)) + 1
    columns = max(width - label, 10)
    columns = min(columns, max(10, round(picture.end / picture.unit * 4)))  # no wider than numbers need
    scale = columns / picture.end
    lines = [[IDLE] * columns for _ in range(stages)]
    for b in sorted(picture.boxes):
        first, last = round(b.start * scale), round(b.end * scale)
        if last == first:  # narrower than a column: shown where nothing else is
            first, last = min(first, columns - 1), min(first, columns - 1) + 1
            if lines[b.rank][first] != IDLE:
                continue
        letter = b.kind.lower() if b.chunk % 2 else b.kind
        text = f"{letter}{b.microbatch}"
        room = last - first
        cell = text.ljust(room, "-") if room > len(text) else text if room == len(text) else letter * room
        lines[b.rank][first:last] = cell
    return "\n".join(f"{r:>{label - 1}} {''.join(line)}" for r, line in enumerate(lines))


def legend(table: Table) -> str:
    """What the letters of `ascii_timeline` mean."""
    kinds = [k for k in WORDS if k == "F" or not table.forward_only]
    words = ", ".join(f"{k} {WORDS[k]}" for k in kinds)
    chunks = "; capitals: chunks 0, 2, ..., small letters: 1, 3, ..." if table.chunks > 1 else ""
    return f"{words}{chunks}; the number is the microbatch; {IDLE} idle"
