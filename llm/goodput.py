"""How much of a run's wall time, over all restarts, went into updates that it kept, and what the rest was lost to."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm.events import EVENTS, read
from llm.workdir import load_config
from parallel.errors import UserError

LOST = ("start", "compile", "restore", "save", "evaluation", "data", "rework", "down")
LOST_TO = {"sample": "evaluation", "rollback": "restore", "stop": "down"}  # kinds of the log that are not named so
SECOND = 1_000_000  # all sums are of whole microseconds, so that they add up


@dataclass
class Interval:
    """Time between two lines of the log: what it was spent on and, of `steps`, the updates that were made in it."""

    begin: int  # microseconds since the first line
    end: int
    kind: str
    first: int = 0  # updates before it
    last: int = 0  # updates after it
    failed: bool = False  # it ended in an update that was not completed
    data: int = 0  # microseconds of it in which the devices waited for a batch
    rework: int = 0  # microseconds of the rest that a restart or a roll-back took back


@dataclass
class Start:
    """One start of the run."""

    time: float
    step: int
    begin: int
    intervals: list[Interval] = field(default_factory=list)
    why: str | None = None

    @property
    def end(self) -> int:
        """When it ended, as far as the log knows."""
        return self.intervals[-1].end if self.intervals else self.begin

    @property
    def last(self) -> int:
        """Updates that it had made in the end."""
        return max([self.step, *(interval.last for interval in self.intervals)])


def account(lines: list[dict[str, Any]]) -> list[Start]:
    """The starts of a run with their time divided up; `lines` as `events.read` gives them.

    Time within a start is told by its own clock, time between two by the wall clock (none when that went backwards).
    An update is taken back when the state of a later line is one before it.
    """
    starts: list[Start] = []
    before: dict[str, Any] = {}
    for line in lines:
        if line["run_s"] == 0 or not starts:
            gap = (line["time"] - starts[-1].time) * SECOND - (starts[-1].end - starts[-1].begin) if starts else 0
            starts.append(Start(line["time"], line["step"], (starts[-1].end if starts else 0) + max(0, round(gap))))
            _take_back(starts, line["step"])
        else:
            start = starts[-1]
            interval = Interval(start.end, max(start.end, start.begin + round(line["run_s"] * SECOND)), before["kind"])
            start.intervals.append(interval)
            if interval.kind == "steps":
                interval.first, interval.last = before["step"], max(before["step"], line["step"])
                interval.data = min(interval.end - interval.begin, max(0, round(line["data_s"] * SECOND)))
            if line["step"] < before["step"]:
                _take_back(starts, line["step"])
            if line["kind"] == "stop":
                start.why = str(line.get("why"))
                interval.failed = start.why != "finished" and not start.why.startswith("SIG")
        before = line
    return starts


def _take_back(starts: list[Start], step: int) -> None:
    """Mark the updates after `step` as lost."""
    for interval in (interval for start in starts for interval in start.intervals if interval.kind == "steps"):
        useful, last = interval.end - interval.begin - interval.data, interval.last + interval.failed
        if last > step:
            lost = useful if step <= interval.first else useful * (last - step) // (last - interval.first)
            interval.rework = max(interval.rework, lost)


def goodput(workdir: str | Path, draw: str = "") -> dict[str, Any]:
    """Productive time and losses of the run in `workdir`, all in seconds, and a picture of them.

    draw: file of the picture, .png or .svg; default: WORKDIR/goodput.png. Returns wall_s (from the first start to the last
    line of the log), productive_s, goodput (their ratio), lost_s (by kind; with productive_s it adds up to wall_s), starts
    (each: time, wall_s, from_step, to_step, stopped: why, or null when it was killed or is running) and picture.
    Raises UserError.
    """
    starts = account(read(workdir))
    if not starts:
        load_config(workdir)  # says so when there is no run at all
        raise UserError(f"--workdir={workdir}: the run has no {EVENTS} yet: train writes it")
    lost = dict.fromkeys(LOST, 0)
    productive = 0
    for before, start in zip([None, *starts], starts):
        lost["down"] += start.begin - before.end if before else 0
        for interval in start.intervals:
            seconds = interval.end - interval.begin
            if interval.kind == "steps":
                lost["data"] += interval.data
                lost["rework"] += interval.rework
                productive += seconds - interval.data - interval.rework
            else:
                lost[LOST_TO.get(interval.kind, interval.kind)] += seconds
    wall = starts[-1].end - starts[0].begin
    picture = Path(draw) if draw else Path(workdir) / "goodput.png"
    document = {
        "wall_s": wall / SECOND,
        "productive_s": productive / SECOND,
        "goodput": productive / wall if wall else None,
        "lost_s": {kind: time / SECOND for kind, time in lost.items()},
        "starts": [
            {
                "time": start.time,
                "wall_s": (start.end - start.begin) / SECOND,
                "from_step": start.step,
                "to_step": start.last,
                "stopped": start.why,
            }
            for start in starts
        ],
        "picture": str(picture),
    }
    _draw(starts, document, picture)
    return document


def table(document: dict[str, Any]) -> str:
    """What `goodput` found, as text."""
    wall = document["wall_s"]
    share = lambda seconds: f"{seconds:14,.1f} s {seconds / wall if wall else 0:8.1%}"
    lines = [f"{'wall':<12}{share(wall)}", f"{'productive':<12}{share(document['productive_s'])}"]
    lines += [f"  {kind:<10}{share(seconds)}" for kind, seconds in document["lost_s"].items()]
    for number, start in enumerate(document["starts"], 1):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["time"]))
        end = start["stopped"] or ("still running, or killed" if number == len(document["starts"]) else "killed")
        lines.append(
            f"start {number}: {when}, steps {start['from_step']} to {start['to_step']}, {start['wall_s']:,.1f} s, {end}"
        )
    return "\n".join([*lines, f"picture: {document['picture']}"])


COLOURS = {
    "productive": "#4c956c",
    "start": "#adb5bd",
    "compile": "#f4a261",
    "restore": "#2a9df4",
    "save": "#9b5de5",
    "evaluation": "#e9c46a",
    "data": "#00b4d8",
    "rework": "#d62828",
    "down": "#343a40",
}


def _draw(starts: list[Start], document: dict[str, Any], path: Path) -> None:
    """Three rows: the updates over time, what the time was spent on, and the losses."""
    from matplotlib.figure import Figure

    wall = document["wall_s"]
    unit, name = next(
        (u, n) for u, n in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds")) if wall >= 3 * u or u == 1
    )
    bars: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLOURS}
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    steps, strip, losses = figure.subplots(3, 1, height_ratios=(4, 1.2, 4))
    for before, start in zip([None, *starts], starts):
        if before:
            bars["down"].append((before.end, start.begin))
        places, updates = [start.begin], [start.step]
        for interval in start.intervals:
            end = interval.end
            if interval.kind == "steps":
                places += [interval.begin, end]
                updates += [interval.first, interval.last]
                cut = [end - interval.rework - interval.data, end - interval.data, end]
                for kind, left, right in zip(("productive", "rework", "data"), [interval.begin, *cut], cut):
                    bars[kind].append((left, right))
            else:
                bars[LOST_TO.get(interval.kind, interval.kind)].append((interval.begin, end))
        scaled = [place / SECOND / unit for place in places]
        steps.plot(scaled, updates, color=COLOURS["productive"])
        steps.plot(scaled[0], updates[0], "o", color=COLOURS["restore"], markersize=4)
    for kind, spans in bars.items():
        strip.broken_barh(_joined(spans, unit), (0, 1), color=COLOURS[kind], linewidth=0)
    for axis in (steps, strip):
        axis.set_xlim(0, max(wall / unit, 1e-9))
    steps.set_ylabel("step")
    steps.set_xticklabels([])
    strip.set_yticks([])
    strip.set_xlabel(f"{name} since the first start")
    values = document["lost_s"].values()
    shares = [100 * value / wall if wall else 0 for value in values]
    drawn = losses.barh(LOST, shares, color=[COLOURS[kind] for kind in LOST])
    losses.bar_label(drawn, [f"{share:.1f} %, {value / unit:,.2f} {name}" for share, value in zip(shares, values)], padding=4)
    losses.invert_yaxis()
    losses.set_xlim(0, 1.3 * max(shares) or 1)
    losses.set_xlabel("lost, % of the wall time")
    restarts = len(starts) - 1
    title = f"{document['goodput'] or 0:.1%} of {wall / unit:,.1f} {name} productive"
    figure.suptitle(f"{title}, {restarts} restart{'s' * (restarts != 1)}")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture {path} cannot be written ({error}): name another by --draw=FILE") from error


def _joined(spans: list[tuple[int, int]], unit: int) -> list[tuple[float, float]]:
    """(begin, width) in units of time; spans that touch become one."""
    joined: list[list[int]] = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(end, joined[-1][1])
        elif end > begin:
            joined.append([begin, end])
    return [(begin / SECOND / unit, (end - begin) / SECOND / unit) for begin, end in joined]
