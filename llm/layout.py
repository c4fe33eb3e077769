"""Layouts of a run: fields that are given, whether the trainer would run one, and the planner's choice for the devices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from llm import costs
from llm.config import BatchConfig, Config, MeshConfig
from parallel import cluster, distributed, frameworks, layouts
from parallel.errors import FitError, UserError
from parallel.planner import Estimate, Layout
from parallel.schedule.registry import SCHEDULES, find

KEPT = {  # options of the configuration that, given on the command line, are not searched
    "mesh.tensor": "tensor",
    "mesh.pipe": "pipe",
    "mesh.data": "data",
    "pipeline.microbatches": "microbatches",
    "pipeline.chunks": "chunks",
    "pipeline.schedule": "schedule",
    "pipeline.remat": "remat",
    "zero": "zero",
}
OF_OTHERS = {"mesh.context": "context", "mesh.expert": "expert"}  # kept for other frameworks only
NOT_COSTED = {  # options that the planner does not know, with the values that ask for nothing
    "mesh.replica": (1,),
    "pipeline.group": (0,),
    "pipeline.layers_per_chunk": ((),),
    "pipeline.memory": (0.0,),
    "pipeline.backward": ("auto",),
}


def _value(config: Config, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def fixed_fields(config: Config, changes: Sequence[tuple[str, str]], ours: bool = True) -> dict:
    """The fields of a layout that the command line gives. ours: for this trainer, which splits neither contexts nor experts.

    Raises UserError for what the planner cannot keep."""
    given = {name for name, _ in changes}
    for name, neutral in NOT_COSTED.items():
        if name in given and _value(config, name) not in neutral:
            raise UserError(f"{name}={_value(config, name)} is not costed by the planner: leave it out, and set it for train")
    out = {}
    for name, field in (KEPT if ours else KEPT | OF_OTHERS).items():
        if name in given:
            value = _value(config, name)
            if field == "schedule" and not find(value).executable:
                raise UserError(f"pipeline.schedule={value} is for simulation and drawing: it is not executed")
            if value not in (0, -1) or field == "zero":  # 0 and -1 leave it open
                out[field] = value
    return out


def as_config(config: Config, layout: Layout) -> Config:
    """The configuration that trains a layout."""
    mesh = MeshConfig(data=layout.data, pipe=layout.pipe, tensor=layout.tensor, context=layout.context)
    pipeline = dataclasses.replace(
        config.pipeline,
        schedule=layout.schedule,
        chunks=layout.chunks if layout.pipe > 1 else 0,
        microbatches=layout.microbatches,
        remat=layout.remat,
        group=0,
        layers_per_chunk=(),
    )
    batch = BatchConfig(layout.rows * layout.microbatches * layout.data, config.batch.length)
    return dataclasses.replace(config, mesh=mesh, pipeline=pipeline, batch=batch, zero=min(layout.zero, 1))


def own_layout(config: Config) -> Layout:
    """The layout of a configuration whose mesh has no -1: the inverse of `as_config`. Raises UserError."""
    c = config.validate()
    rows, pipe = c.batch.rows // c.mesh.batch_shards // c.pipeline.microbatches, c.mesh.pipe
    spec = SCHEDULES.get(c.pipeline.schedule)
    chunks = c.pipeline.chunks or (spec.chunks if spec else 1) or 1
    return Layout(
        tensor=c.mesh.tensor,
        pipe=pipe,
        data=c.mesh.batch_shards,
        context=c.mesh.context,
        rows=rows,
        microbatches=c.pipeline.microbatches,
        chunks=chunks if pipe > 1 else 1,
        schedule=c.pipeline.schedule,
        zero=c.zero,
        remat=c.pipeline.remat,
    )


def possible(config: Config, layout: Layout) -> bool:
    """Whether the trainer would run this layout: its own check, without compiling."""
    try:
        as_config(config, layout).validate(layout.gpus)
    except UserError:
        return False
    return True


def auto_layout(config: Config, devices: Sequence[Any], changes: Sequence[tuple[str, str]] = ()) -> tuple[Config, str]:
    """The configuration with the planner's layout for these jax devices, and what was chosen and why.

    The batch stays as it is, and so do the fields of the layout that `changes` (the command line) give. The result has
    plan="", so a saved one keeps its layout. Raises UserError for a GPU that is not known, FitError when nothing fits.
    """
    machine, count = _machine(devices), len(devices)
    model, speeds = costs.operators(config.model), frameworks.find("convoy", machine.gpu.name, "bf16")
    length, rows = config.batch.length, config.batch.rows
    found = layouts.search(
        model, length, rows, count, machine, speeds, "bf16", fixed_fields(config, changes),
        lambda layout: possible(config, layout), exact=True,
    )  # fmt: skip
    if not found.fits:
        limit = machine.gpu.hbm_gib * layouts.SPARE
        raise FitError(
            f"plan=auto: nothing fits {limit:.1f} GiB of each of {count} {machine.gpu.name}: the nearest layout needs "
            f"{found.nearest.peak_memory_gib:.1f} GiB ({label(found.nearest.layout)}); "
            "more devices, fewer rows or a smaller model would help"
        )
    best = found.fits[0]
    chosen = dataclasses.replace(as_config(config, best.layout), plan="")
    text = f"plan=auto on {count} {machine.gpu.name}: {label(best.layout)}, {best.peak_memory_gib:.1f} GiB. {why(found.fits)}"
    return chosen, text


def _machine(devices: Sequence[Any]) -> cluster.Cluster:
    """The cluster that jax's devices are; virtual CPU devices share the cores and the memory of the machine."""
    count, kind = len(devices), devices[0].device_kind
    if devices[0].platform != "cpu":
        nodes = distributed.nodes(devices)
        return cluster.of_gpu(cluster.find_gpu(kind), nodes.count(nodes[0]))
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return cluster.of_cpu(count, os.cpu_count() or 1, ram)


def label(l: Layout) -> str:
    """A layout in a few words."""
    mesh = f"data {l.data} x pipe {l.pipe} x tensor {l.tensor}"
    mesh += f" x context {l.context}" * (l.context > 1) + f", experts over {l.expert}" * (l.expert > 1)
    return f"{mesh}, {l.microbatches} microbatches of {l.rows}, {l.chunks} chunks, remat {l.remat}"


def why(fits: list[Estimate]) -> str:
    """Why the first layout wins over the best one on another mesh, and what limits it."""
    best = fits[0]
    share = {k: v / best.step_time_s for k, v in best.parts.items()}
    loss = max((k for k in share if k != "compute"), key=share.get)
    limit = (
        f"{100 * share['compute']:.0f} % of the step computes; the largest loss is {NAMES[loss]} with {100 * share[loss]:.1f} %"
    )
    shape = lambda e: (e.layout.tensor, e.layout.pipe)
    other = next((e for e in fits[1:] if shape(e) != shape(best)), fits[1] if len(fits) > 1 else None)
    if other is None:
        return f"It is the only layout that fits. {limit}."
    slower = best.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu - 1
    gap = lambda k: other.parts[k] / other.step_time_s - best.parts[k] / best.step_time_s
    most = max(NAMES, key=gap)
    reason = (
        f"which spends {100 * other.parts[most] / other.step_time_s:.1f} % on {NAMES[most]} (here {100 * share[most]:.1f} %)"
    )
    return f"It is {100 * slower:.1f} % faster than {label(other.layout)}, {reason}. {limit}."


NAMES = dict(
    compute="computing",
    bubble="the pipeline's bubble",
    tensor="tensor communication",
    context="context communication",
    expert="the experts' exchange",
    pipe="pipeline messages",
    data="the gradient reduction",
    optimizer="the optimiser",
    fixed="fixed time",
    noise="slow nodes",
)
