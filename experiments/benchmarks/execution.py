"""Predicted against measured time of a training step, schedule by schedule, on virtual devices (schedules.py --execute).

The prediction knows only what single actions cost. These are measured by programs that run N idle ticks of one slot: in idle
mode *compute* a rank works in every tick, and the difference between two N is the tick. Machine model: virtual devices share
the cores, so a tick costs the larger of its slowest rank and its total work over the cores."""

import dataclasses
import statistics
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from llm.step import Program, build
from parallel.errors import UserError
from parallel.schedule.slots import JOINT_FIELDS, RANK_FIELDS

SCHEDULES = (
    ("gpipe", 1, "whole"),
    ("1f1b", 1, "whole"),
    ("eager-1f1b", 1, "split"),
    ("interleaved", 2, "whole"),
    ("interleaved", 2, "split"),
    ("interleaved", 4, "split"),
    ("zb-h1", 1, "split"),
    ("zb-v", 2, "split"),
)
MODEL = ModelConfig(width=128, heads=4, ffn=384, vocab=512)
LENGTH, REPEATS, TICKS = 128, 5, (8, 40)


def program(stages: int, m: int, schedule: str, chunks: int, backward: str, idle: str) -> Program:
    config = Config(
        model=dataclasses.replace(MODEL, layers=4 * stages),
        mesh=MeshConfig(pipe=stages),
        pipeline=PipelineConfig(schedule=schedule, chunks=chunks, microbatches=m, backward=backward, idle=idle),
        batch=BatchConfig(rows=m, length=LENGTH),
        optimizer=OptimizerConfig(name="sgd", momentum=0.0),
    )
    return build(config, jax.devices()[:stages])


def rows_of(p: Program) -> dict[str, np.ndarray]:
    rows, length = p.batch_shape
    tokens, targets = np.random.default_rng(0).integers(0, MODEL.vocab, (2, rows, length)).astype(np.int32)
    position = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    whole = dict(segments=0 * tokens, positions=position, weights=np.ones((rows, length), np.float32))
    return dict(tokens=tokens, targets=targets, example=np.arange(rows, dtype=np.int32), **whole)


class Timer:
    """The gradients of a program, compiled; call it for one timed run in seconds."""

    def __init__(self, p: Program):
        self.mesh, self.step = p.mesh, jax.jit(p.gradients)
        self.arguments = p.init(), p.put(rows_of(p)), p.device_table
        self()

    def __call__(self) -> float:
        with jax.set_mesh(self.mesh):
            start = time.perf_counter()
            jax.block_until_ready(self.step(*self.arguments))
            return time.perf_counter() - start


def idle_ticks(p: Program, ticks: int, slots: tuple[bool, bool, bool], joint: bool) -> Program:
    """The same program with nothing but ticks that compute `slots` in vain; joint: and the vocabulary work of a microbatch."""
    plan, rows = p.plan, p.plan.rows
    empty = dataclasses.replace(rows, ranks=rows.ranks[:0], joint=rows.joint[:0]).padded(ticks, rows.slots, rows.moves)
    for i, field in enumerate(RANK_FIELDS):  # move through the stash, the chunks and the batch as real work does
        kind, _, what = field.partition("_")
        turns = dict(m=p.table.microbatches, c=p.table.chunks, **{name: rows.slots[name] + 1 for name in ("a", "aw", "cut")})
        if kind in "FBW" and what in turns:
            empty.ranks[..., i] = np.arange(ticks)[:, None] % turns[what]
    if joint:
        empty = dataclasses.replace(empty, joint=np.zeros((ticks, len(JOINT_FIELDS)), np.int32))
    fake = SimpleNamespace(fused=p.tick_table.fused, phases=lambda: [(0, ticks, slots)])
    idle = Program(p.config, p.devices)
    vars(idle)["plan"] = dataclasses.replace(plan, ticks=fake, rows=empty)
    return idle


def tick_cost(p: Program, slots: str, joint: bool = False) -> tuple[float, float]:
    """(seconds of one tick in which all ranks compute these slots, seconds of a step without ticks)."""
    held = tuple(kind in slots for kind in "FBW")
    short, long = (Timer(idle_ticks(p, n, held, joint)) for n in TICKS)
    pairs = [(short(), long()) for _ in range(REPEATS)]
    few, many = (statistics.median(times) for times in zip(*pairs))
    cost = (many - few) / (TICKS[1] - TICKS[0])
    return cost, few - TICKS[0] * cost


def action_costs(stages: int, m: int, cores: int, kinds: set[tuple[int, bool]]) -> dict:
    """Seconds on one core of F, B and W (fused: B is B and W) of a chunk, {(chunks, fused): (F, B, W)}; and of a microbatch's
    vocabulary work on all ranks, and of a step without ticks."""
    share = min(cores, stages) / stages
    costs, extra = {}, {}
    for chunks, fused in sorted(kinds):
        name = "interleaved" if chunks > 1 else "eager-1f1b"
        p = program(stages, m, name, chunks, "whole" if fused else "split", "compute")
        # B beside F and W beside both: alone, they would read buffers that nothing writes, and XLA folds those away
        f, base = tick_cost(p, "F")
        fb = tick_cost(p, "FB")[0]
        w = 0.0 if fused else tick_cost(p, "FBW")[0] - fb
        costs[chunks, fused] = tuple(share * x for x in (f, fb - f, w))
        if not extra:
            extra = dict(base=base, vocabulary=tick_cost(p, "FB", joint=True)[0] - fb)
        print(f"actions of {chunks} chunks{' fused' if fused else ''}: {costs[chunks, fused]}", file=sys.stderr)
    return dict(costs=costs, **extra)


def predict(p: Program, measured: dict, cores: int) -> float:
    """Seconds of a step of this program by the machine model."""
    t = p.tick_table
    unit = np.array(measured["costs"][t.table.chunks, t.fused])
    own = t.busy.astype(float)  # [ticks, ranks, slots]
    if p.idle == "compute":
        for start, stop, held in t.phases():
            own[start:stop] = np.array(held, float)
    work = own @ unit
    ticks = np.maximum(work.max(1), work.sum(1) / cores).sum()
    return float(ticks + t.table.microbatches * measured["vocabulary"] + measured["base"])


def execute(stages: int, microbatches: int, cores: int) -> list[dict]:
    """One object per schedule and idle mode: predicted and measured seconds of a step, and the error of the prediction."""
    runs = []
    for name, chunks, backward in SCHEDULES:
        for idle in ("compute", "skip"):
            try:
                runs.append((name, chunks, backward, idle, program(stages, microbatches, name, chunks, backward, idle)))
            except UserError as error:
                print(f"{name}: {error}", file=sys.stderr)
    kinds = {(p.tick_table.table.chunks, p.tick_table.fused) for *_, p in runs}
    measured = action_costs(stages, microbatches, cores, kinds)
    timers = [Timer(p) for *_, p in runs]
    times = [[timer() for timer in timers] for _ in range(REPEATS)]  # alternated
    result = []
    for (name, chunks, backward, idle, p), own in zip(runs, zip(*times)):
        predicted, seconds = predict(p, measured, cores), statistics.median(own)
        result.append(
            dict(
                name=name,
                chunks=chunks,
                backward=backward,
                idle=idle,
                stages=stages,
                microbatches=microbatches,
                ticks=p.tick_table.length,
                predicted_s=round(predicted, 4),
                measured_s=round(seconds, 4),
                error_pct=round(100 * (predicted / seconds - 1), 1),
            )
        )
    return result


def wrong_pairs(result: list[dict]) -> list[tuple[str, str]]:
    """Pairs in idle mode compute whose predictions differ by more than 10 % and whose measured order is the other one."""
    rows = [r for r in result if r["idle"] == "compute"]
    label = lambda r: f"{r['name']}/{r['chunks']}/{r['backward']}"
    return [
        (label(a), label(b))
        for a in rows
        for b in rows
        if a["predicted_s"] * 1.1 < b["predicted_s"] and a["measured_s"] >= b["measured_s"]
    ]
