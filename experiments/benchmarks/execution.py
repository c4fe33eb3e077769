"""Predicted against measured time of a training step, schedule by schedule, on virtual devices (schedules.py --execute).

The prediction knows only what single actions cost. These are measured by programs whose ticks compute the same slots N times
over, in the same buffers and with the same permutes as real work: in idle mode *compute* a rank works in every tick. What a
step costs without ticks (casts, buffers, reduction, optimiser) is measured for every schedule by its own program with a
single tick. All programs, the steps among them, run in turn, so that a change of the machine's load meets all alike.

Two clocks: wall, and cores: the process's CPU time over the number of cores, which is what the wall shows when the cores are
busy with nothing else. Other processes disturb the first, hardly the second."""

import dataclasses
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np

from experiments.benchmarks.common import cpu_seconds, random_batch
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from llm.step import Program, build
from parallel.schedule.slots import JOINT_FIELDS, RANK_FIELDS

SCHEDULES = (
    ("gpipe", 1, "whole"),
    ("1f1b", 1, "whole"),
    ("eager-1f1b", 1, "split"),
    ("zb-h1", 1, "split"),
    ("interleaved", 2, "split"),
    ("interleaved", 4, "split"),
    ("zb-v", 2, "split"),
)
IDLE = ("compute", "skip")
CLOCKS = ("wall", "cores")
MODEL = ModelConfig(width=128, heads=4, ffn=384, vocab=512)
LENGTH, LAYERS, REPEATS, TICKS = 128, 4, 5, 24  # LAYERS: of a rank
MACHINE = "virtual devices share the cores: a tick costs the larger of its slowest rank and its total work over the cores"


def program(stages: int, m: int, schedule: str, chunks: int, backward: str, idle: str) -> Program:
    config = Config(
        model=dataclasses.replace(MODEL, layers=LAYERS * stages),
        mesh=MeshConfig(pipe=stages),
        pipeline=PipelineConfig(schedule=schedule, chunks=chunks, microbatches=m, backward=backward, idle=idle),
        batch=BatchConfig(rows=m, length=LENGTH),
        optimizer=OptimizerConfig(name="sgd", momentum=0.0),
    )
    return build(config, jax.devices()[:stages])


class Timers:
    """Compiled training steps by name, timed in turn. States and batches are made once for each number of chunks."""

    def __init__(self, cores: int):
        self.cores, self.calls, self.given = cores, {}, {}

    def add(self, name: tuple, p: Program) -> None:
        """Compile a program's step and run it once."""
        chunks = p.table.chunks
        if chunks not in self.given:
            self.given[chunks] = p.init(), p.put(random_batch(*p.batch_shape, MODEL.vocab))
        arguments = (*self.given[chunks], p.device_table)
        step = jax.jit(lambda state, batch, table: p.apply(state, *p.gradients(state, batch, table)))

        def call() -> tuple[float, float]:
            with jax.set_mesh(p.mesh):
                start, used = time.perf_counter(), cpu_seconds()
                jax.block_until_ready(step(*arguments))
                return time.perf_counter() - start, (cpu_seconds() - used) / self.cores

        print(f"{' '.join(map(str, name))}: compiled in {call()[0]:.1f} s", file=sys.stderr)
        self.calls[name] = call

    def medians(self) -> dict[str, dict[tuple, float]]:
        """{clock: {name: seconds}}, medians over alternated repeats."""
        times = [[call() for call in self.calls.values()] for _ in range(REPEATS)]
        middle = [np.median(own, axis=0) for own in zip(*times)]
        return {clock: dict(zip(self.calls, (float(m[i]) for m in middle))) for i, clock in enumerate(CLOCKS)}


def same_ticks(p: Program, ticks: int, slots: str, joint: bool = False) -> Program:
    """The program with nothing but `ticks` that compute `slots` in vain, and one that computes all: what F wrote is thus read.

    joint: every tick has the vocabulary work of a microbatch, too."""
    plan, rows = p.plan, p.plan.rows
    same = dataclasses.replace(rows, ranks=rows.ranks[:0], joint=rows.joint[:0]).padded(ticks + 1, rows.slots, rows.moves)
    turns = dict(m=p.table.microbatches, c=p.table.chunks) | {name: n + 1 for name, n in rows.slots.items()}
    for i, field in enumerate(RANK_FIELDS):  # move through the buffers, the chunks and the batch as real work does
        head, _, tail = field.partition("_")
        what = tail if head in "FBW" else head
        if what in turns:
            same.ranks[..., i] = np.arange(ticks + 1)[:, None] % turns[what]
    if joint:
        same = dataclasses.replace(same, joint=np.zeros((ticks + 1, len(JOINT_FIELDS)), np.int32))
    phases = [(0, ticks, tuple(kind in slots for kind in "FBW")), (ticks, ticks + 1, (True,) * 3)]
    if phases[0][2] == phases[1][2] or not ticks:
        phases = [(0, ticks + 1, (True,) * 3)]
    fake = SimpleNamespace(fused=p.tick_table.fused, phases=lambda: phases)
    other = Program(p.config, p.devices)
    vars(other).update(table=p.table, plan=dataclasses.replace(plan, ticks=fake, rows=same))
    return other


def kind_of(p: Program) -> tuple[int, bool]:
    """Programs of one kind share the costs of their actions: (chunks, whether B and W are one program)."""
    return p.tick_table.table.chunks, p.tick_table.fused


def costs_of(seconds: dict[tuple, float], model: tuple, kind: tuple[int, bool]) -> dict[str, float]:
    """Seconds of F, B, W (fused: B is both) and of a microbatch's vocabulary work, on all ranks at once.

    Each action as it is beside those before it in a tick. model: the schedule whose buffers the programs have."""
    per_tick = lambda slots: (seconds["ticks", *kind, slots] - seconds["one tick", *model]) / TICKS
    f, fb = per_tick("F"), per_tick("FB")
    fbw = fb if kind[1] else per_tick("FBW")
    return dict(F=f, B=fb - f, W=fbw - fb)


def predict(p: Program, costs: dict[str, float], vocabulary: float, one_tick: float, cores: int) -> float:
    """Seconds of a step of this program by the machine model."""
    t = p.tick_table
    stages = t.table.stages
    alone = np.array(list(costs.values())) * min(cores, stages) / stages  # of one rank with a core to itself
    own = t.busy.astype(float)  # [ticks, ranks, slots]
    if p.idle == "compute":
        for start, stop, held in t.phases():
            own[start:stop] = np.array(held, float)
    work = own @ alone
    ticks = np.maximum(work.max(1), work.sum(1) / cores).sum()
    return float(ticks + t.table.microbatches * vocabulary + one_tick - sum(costs.values()))


def execute(stages: int, microbatches: int, cores: int) -> dict[str, list[dict]]:
    """{clock: one object per schedule}: predicted and measured seconds of a step in both idle modes, and the error."""
    timers, programs, models = Timers(cores), {}, {}
    for schedule in SCHEDULES:
        for idle in IDLE:
            p = programs[schedule, idle] = program(stages, microbatches, *schedule, idle)
            timers.add(("step", *schedule, idle), p)
        p, model = programs[schedule, "compute"], models.setdefault(kind_of(programs[schedule, "compute"]), schedule)
        timers.add(("one tick", *schedule), same_ticks(p, 0, "FBW"))
        if model == schedule:
            for slots in ("F", "FB") if kind_of(p)[1] else ("F", "FB", "FBW"):
                timers.add(("ticks", *kind_of(p), slots), same_ticks(p, TICKS, slots))
        if len(models) == 1 and model == schedule:
            timers.add(("joint",), same_ticks(p, TICKS, "FBW", joint=True))
    return {clock: compared(programs, models, seconds, cores) for clock, seconds in timers.medians().items()}


def compared(programs: dict, models: dict, seconds: dict[tuple, float], cores: int) -> list[dict]:
    """One object per schedule, by one clock. models: {kind: the schedule whose programs measured its actions}."""
    first = next(iter(models))
    vocabulary = (seconds["joint",] - seconds["ticks", *first, "FB" if first[1] else "FBW"]) / (TICKS + 1)
    rows = []
    for schedule in SCHEDULES:
        row = dict(zip(("name", "chunks", "backward"), schedule))
        for idle in IDLE:
            p = programs[schedule, idle]
            costs = costs_of(seconds, models[kind_of(p)], kind_of(p))
            predicted = predict(p, costs, vocabulary, seconds["one tick", *schedule], cores)
            measured = seconds["step", *schedule, idle]
            facts = dict(ticks=p.tick_table.length, predicted_s=predicted, measured_s=measured)
            facts["error_pct"] = 100 * (predicted / measured - 1)
            row |= {f"{idle}_{name}": value for name, value in facts.items()}
        rows.append(row)
    return rows


def summary(rows: list[dict], clock: str) -> dict:
    """What a set of rows says together: errors of the cost model and the pairs in the wrong order."""
    mean = lambda idle: sum(abs(row[f"{idle}_error_pct"]) for row in rows) / len(rows)
    label = lambda row: f"{row['name']}/{row['chunks']}/{row['backward']}"
    apart = [(a, b) for a in rows for b in rows if a["compute_predicted_s"] * 1.1 < b["compute_predicted_s"]]
    wrong = [[label(a), label(b)] for a, b in apart if a["compute_measured_s"] >= b["compute_measured_s"]]
    return dict(
        clock=clock,
        **{f"{idle}_mean_error_pct": mean(idle) for idle in IDLE},
        pairs_more_than_10_pct_apart=len(apart),
        pairs_in_wrong_order=wrong,
        schedules=rows,
    )


def table(found: dict) -> str:
    """Both idle modes beside each other, for a reader."""
    clock = dict(wall="wall clock", cores="CPU time over the cores")[found["clock"]]
    lines = [
        f"{clock:<28}{'idle slots computed':<38}idle slots skipped",
        f"{'schedule':<14}{'chunks':>6}  {'':<6}" + f"{'ticks':>5} {'predicted':>10} {'measured':>9} {'error':>7}     " * 2,
    ]
    for row in found["schedules"]:
        line = f"{row['name']:<14}{row['chunks']:>6}  {row['backward']:<6}"
        for idle in IDLE:
            ticks, predicted, measured, error = (
                row[f"{idle}_{k}"] for k in ("ticks", "predicted_s", "measured_s", "error_pct")
            )
            line += f"{ticks:>5} {predicted:>8.3f} s {measured:>7.3f} s {error:>5.1f} %     "
        lines.append(line.rstrip())
    lines += [
        f"mean error of the cost model: {found['compute_mean_error_pct']:.1f} % computed, {found['skip_mean_error_pct']:.1f} % "
        "skipped",
        f"computed: {found['pairs_more_than_10_pct_apart']} pairs are predicted more than 10 % apart, "
        f"{len(found['pairs_in_wrong_order'])} of them in the wrong order {found['pairs_in_wrong_order'] or ''}".rstrip(),
    ]
    return "\n".join(lines)
