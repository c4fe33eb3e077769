"""Predicted over measured ticks of a run's training step."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llm.config import Config
from llm.run import open_run
from llm.step import COSTS, Program
from llm.workdir import load_config
from parallel.errors import UserError
from parallel.schedule.boxes import of_ticks
from parallel.schedule.draw import draw_over
from parallel.schedule.simulate import tick_durations

REPEATS = 5


def measure(program: Program, params: Any, batch: dict[str, np.ndarray], repeats: int = REPEATS) -> np.ndarray:
    """Seconds of each tick of the forward and backward pass, [ticks]: medians over `repeats` steps compiled with time stamps.

    A rank stamps the moment at which everything of a tick is computed; a tick lasts from when the slowest rank has
    finished the one before until the slowest rank has finished it. The first tick includes what comes before it (casts and
    gathers of the weights)."""
    stamps: list[tuple[float, int]] = []
    stamp = lambda rank, tick, _: stamps.append((time.perf_counter(), int(tick)))
    stamped = dataclasses.replace(program, stamp=stamp)
    step = stamped.jit(stamped.gradients)
    state = dict(params=params, step=np.int32(0))
    runs = []
    with jax.set_mesh(program.mesh):
        arguments = state, program.put(batch), stamped.device_table
        for _ in range(repeats + 1):  # the first compiles
            stamps.clear()
            start = time.perf_counter()
            jax.block_until_ready(step(*arguments))
            jax.effects_barrier()
            ends = np.full(program.tick_table.length, start)
            for when, tick in stamps:
                ends[tick] = max(ends[tick], when)
            runs.append(np.diff(np.maximum.accumulate(ends), prepend=start))
    return np.median(runs[1:], axis=0)


def timeline(workdir: str | Path, config: Config | None = None, step: int | None = None, picture: str = "") -> dict[str, Any]:
    """Measure the ticks of a run's training step in the layout of `config` (None: the run's own) and draw them.

    Inside a tick the measured time is shared by F, B and W as the costs say. It means most where each rank has a device of
    its own.

    picture: where to, .png or .svg; WORKDIR/timeline.png by default. Predicted times are the relative times of F, B and W
    (llm.step.COSTS) scaled to the measured total. Returns schedule, ticks, predicted_s and measured_s (lists), error_pct
    (mean absolute error of a tick in percent of the mean tick) and picture. Raises UserError."""
    config = config or load_config(workdir)
    if config.mesh.tensor > 1:
        raise UserError(
            f"timeline measures ranks of the pipe, and mesh.tensor={config.mesh.tensor} splits each over devices: "
            "add --config.mesh.tensor=1"
        )
    run = open_run(workdir, step, config)
    program = run.program
    rows, length = program.batch_shape
    measured = measure(program, run.params, run.corpus.batch(run.config.train.seed, run.step, rows, length))
    costs = COSTS[run.config.pipeline.remat]
    predicted = tick_durations(program.tick_table, costs, program.idle)
    predicted *= measured.sum() / predicted.sum()
    picture = picture or str(Path(workdir) / "timeline.png")
    ticks = program.tick_table
    panel = lambda seconds: of_ticks(ticks, costs, program.idle, durations=1000 * seconds)
    name = f"{ticks.table.name}, {ticks.table.stages} ranks, {ticks.table.microbatches} microbatches"
    titles = f"predicted: {name}, idle slots: {program.idle}", f"measured: {1000 * measured.sum():.0f} ms"
    draw_over(dict(zip(titles, (panel(predicted), panel(measured)))), picture, "ms")
    return dict(
        schedule=ticks.table.name,
        ticks=ticks.length,
        predicted_s=[round(float(s), 6) for s in predicted],
        measured_s=[round(float(s), 6) for s in measured],
        error_pct=round(float(100 * np.abs(predicted - measured).mean() / measured.mean()), 1),
        picture=picture,
    )


def table(result: dict[str, Any]) -> str:
    """The result for a reader."""
    rows = [f"{'tick':>5} {'predicted ms':>13} {'measured ms':>12}"]
    for i, (p, m) in enumerate(zip(result["predicted_s"], result["measured_s"])):
        rows.append(f"{i:>5} {1000 * p:>13.2f} {1000 * m:>12.2f}")
    total = f"{'sum':>5} {1000 * sum(result['predicted_s']):>13.2f} {1000 * sum(result['measured_s']):>12.2f}"
    mean = f"mean error of a tick: {result['error_pct']} % of the mean tick; drawn in {result['picture']}"
    return "\n".join([*rows, total, mean])
