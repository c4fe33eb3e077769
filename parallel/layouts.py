"""Which layout runs a model best: every possible one is costed in closed form, the best by their schedule tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from parallel.cluster import SPARE, Cluster
from parallel.errors import UserError
from parallel.frameworks import Framework
from parallel.operators import Operators
from parallel.planner import Estimate, Layout, estimate
from parallel.schedule.registry import SCHEDULES

SHOWN = 12
"""Layouts that are costed by their tables at most, of those that fit."""
TRIES = 96
"""Tables made at most."""
WITHIN = 0.05
"""By how much of the batch a layout may round the rows to what it divides."""


@dataclasses.dataclass(frozen=True)
class Search:
    """What was found: estimates that fit, best first; the one nearest to fitting when none does; how many were looked at."""

    fits: list[Estimate]
    nearest: Estimate | None
    looked_at: int


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def proposals(model: Operators, rows: int, gpus: int, cluster: Cluster, fixed: Mapping, exact: bool) -> Iterator[Layout]:
    """Layouts for `gpus` GPUs and about `rows` rows; fixed: fields of `Layout` that are given. exact: not one row else.

    Symmetry and sense prune: tensor stays inside NVLink and divides the heads, a pipeline has a layer for every chunk, rows
    of a microbatch and chunks are powers of two unless given.
    """
    wanted = lambda name, values: [fixed[name]] if name in fixed else list(values)
    context = fixed.get("context", 1)
    for t in wanted("tensor", (t for t in divisors(model.heads) if t <= cluster.domain)):
        for p in wanted("pipe", (p for p in divisors(gpus // t if gpus % t == 0 else 1) if p <= min(model.layers, 64))):
            if gpus % (t * p * context):
                continue
            data = gpus // (t * p * context)
            if fixed.get("data", data) != data or data > rows * (1 + WITHIN):
                continue
            shares = [rows // data] if rows % data == 0 else [] if exact else [max(1, round(rows / data))]
            for share in shares:
                if abs(share * data - rows) > WITHIN * rows:
                    continue
                yield from _inner(model, t, p, data, share, fixed, wanted)


def _inner(model: Operators, t: int, p: int, data: int, share: int, fixed: Mapping, wanted: Callable) -> Iterator[Layout]:
    if "rows" in fixed:
        sizes = [fixed["rows"]] if share % fixed["rows"] == 0 else []
        sizes = [r for r in sizes if fixed.get("microbatches", share // r) == share // r]
    elif "microbatches" in fixed:
        sizes = [share // fixed["microbatches"]] if share % fixed["microbatches"] == 0 else []
    else:
        sizes = [r for r in (1, 2, 4, 8, 16, 32) if share % r == 0 and (p == 1 or share // r >= p)]
        sizes = sizes or ([1] if share else [])
    for r in sizes:
        for name in wanted("schedule", ("interleaved",)):
            spec = SCHEDULES[name]
            few = (1, 2, 4, 8) if spec.free_chunks else (spec.chunks,)
            for v in wanted("chunks", [v for v in few if p * v <= model.layers] if p > 1 else few[:1]):
                for remat in wanted("remat", ("none", "selective", "full")):
                    for zero in wanted("zero", (1 if data > 1 else 0,)):
                        for e in wanted("expert", _expert_groups(model, data * t)):
                            yield Layout(t, p, data, fixed.get("context", 1), r, share // r, v, name, zero, remat, expert=e)


def _expert_groups(model: Operators, gpus: int) -> list[int]:
    """Over how many GPUs a layer's experts may be divided: powers of two, the whole layer at most."""
    if not model.experts:
        return [1]
    return [e for e in (1, 2, 4, 8, 16, 32, 64) if model.experts.count % e == 0 and gpus % e == 0]


def _same(a: Estimate, b: Estimate) -> bool:
    """The same in all but a remat that makes no difference (flash attention has no core to compute again)."""
    return (a.step_time_s, a.peak_memory_gib, a.layout.data) == (b.step_time_s, b.peak_memory_gib, b.layout.data)


def search(
    model: Operators,
    length: int,
    rows: int,
    gpus: int,
    cluster: Cluster,
    framework: Framework,
    precision: str,
    fixed: Mapping,
    possible: Callable[[Layout], bool],
    exact: bool = False,
    shown: int = SHOWN,
) -> Search:
    """Rank layouts by tokens per second. possible: the trainer's own check of a layout.

    Raises UserError when the given fields leave no layout at all.
    """
    limit = cluster.gpu.hbm_gib * SPARE
    guess = lambda layout, quick: estimate(model, length, layout, cluster, framework, precision, quick=quick)
    quick: list[Estimate] = []
    looked_at = 0
    closed = fixed.get("schedule", "interleaved") == "interleaved"
    for layout in proposals(model, rows, gpus, cluster, fixed, exact):
        looked_at += 1
        quick.append(guess(layout, True))
    quick.sort(key=lambda e: -e.tokens_per_s_per_gpu)
    allowed = (e for e in quick if possible(e.layout))
    fits, nearest, tries = [], None, 0
    for rough in allowed:
        if len(fits) >= shown or tries >= TRIES:
            break
        if rough.peak_memory_gib > limit * (1.1 if closed else 1.6):
            nearest = rough if nearest is None or rough.peak_memory_gib < nearest.peak_memory_gib else nearest
            continue
        tries += 1
        try:
            full = guess(rough.layout, False)
        except UserError:  # the schedule's own rule
            continue
        if full.peak_memory_gib <= limit:
            if not any(_same(full, other) for other in fits):
                fits.append(full)
        elif nearest is None or full.peak_memory_gib < nearest.peak_memory_gib:
            nearest = full
    if not fits and not closed:  # the closed form is of another schedule: try those that hold least
        for rough in sorted(quick, key=lambda e: e.peak_memory_gib)[:TRIES]:
            try:
                full = guess(rough.layout, False) if possible(rough.layout) else None
            except UserError:
                continue
            if full and full.peak_memory_gib <= limit:
                fits.append(full)
    if not fits and nearest is None:
        given = ", ".join(f"{name} {value}" for name, value in fixed.items())
        raise UserError(
            f"no layout of {gpus} GPUs for {rows} rows" + (f" with {given}" if given else "") + ": tensor must divide "
            f"{model.heads} heads, pipe x chunks is at most {model.layers} (layers), and data x microbatches divides the rows"
        )
    fits.sort(key=lambda e: -e.tokens_per_s_per_gpu)
    return Search(fits[:shown], nearest, looked_at)
