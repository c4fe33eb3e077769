"""The compile command: the training step compiled for GPUs on a machine without any, and what the program holds and does.

It is the very function that `train` jits, on shapes instead of arrays; a child process with a compiler for GPUs
(parallel/deviceless.py) makes it, and its text says what one step costs on one GPU."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from llm.config import Config, MeshConfig
from llm.fields import from_dict, to_dict
from parallel import deviceless
from parallel.cluster import Cluster, find_cluster
from parallel.errors import FitError, UserError
from parallel.layouts import SPARE

TARGETS = {"A100-40": "a100-40g", "A100-80": "a100-80g", "H100-80": "h100", "H200": "h200", "B200": "b200"}
"""Name of a GPU in parallel/cluster.py -> what it is compiled for as."""
CPU_FORM = 64
"""GPUs up to which the step is also traced for as many CPU devices, to say what `train` prints on them."""


def compile_step(
    config: Config,
    cluster: str | Cluster,
    gpus: int = 0,
    progress: Callable[[float], None] | None = None,
    changes: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """What the training step of a configuration holds and does on each of `gpus` GPUs of a cluster (0: as the mesh says).

    The keys are described in docs/compile.md; bytes, FLOPs and counts are of one GPU and one step. progress: called about
    once a second with the seconds so far. changes: options that plan=auto leaves as they are. Raises UserError before
    anything is compiled."""
    machine = find_cluster(cluster) if isinstance(cluster, str) else cluster
    if machine.gpu.name not in TARGETS:
        raise UserError(
            f"the cluster {machine.name} has the GPU {machine.gpu.name}, which cannot be compiled for: "
            f"there are {', '.join(TARGETS)}"
        )
    target = TARGETS[machine.gpu.name]
    if config.plan:
        config = _planned(config, target, gpus, machine.gpus_per_node, changes)
    if not gpus and -1 in config.mesh.sizes().values():
        raise UserError("an axis of the mesh is -1 and takes the GPUs that are left: say how many there are with --gpus=N")
    gpus = gpus or config.validate().mesh.product
    config = config.validate(gpus)
    deviceless.topology(gpus, machine.gpus_per_node)  # refuses GPUs that do not fill their hosts
    deviceless.environment()
    document = dict(config=to_dict(config), per_host=machine.gpus_per_node)
    cpus = gpus if gpus <= CPU_FORM else 1
    return deviceless.call(target, "llm.compile:compiled_facts", document, progress, cpus)


def _planned(config: Config, target: str, gpus: int, per_host: int, changes: Sequence[tuple[str, str]]) -> Config:
    """The configuration with the planner's layout for these GPUs, as `train` would have it on them."""
    from llm.layout import auto_layout

    if not gpus:
        raise UserError("plan=auto chooses a layout for a number of GPUs: say how many there are with --gpus=N")
    kind = deviceless.TARGETS[target].device
    devices = [SimpleNamespace(platform="gpu", device_kind=kind, process_index=i // per_host) for i in range(gpus)]
    config, text = auto_layout(config, devices, changes)
    print(text, file=sys.stderr)
    return config


def compiled_facts(target: str, document: dict[str, Any]) -> dict[str, Any]:
    """`compile_step` in the child process."""
    import jax

    from llm.step import build
    from parallel import hlo, xla_flags

    config = from_dict(document["config"], Config)
    devices = deviceless.devices(target, config.mesh.product, document["per_host"])
    program = build(config, devices)
    start = time.monotonic()
    program.arguments  # noqa: B018 - makes small arrays, which the described devices cannot hold
    with jax.default_device(devices[0]), jax.set_mesh(program.mesh):
        compiled = program.traced.lower().compile()
    seconds = time.monotonic() - start
    found, taken = hlo.instructions(compiled.as_text()), share(program)
    held = held_bytes(program, hlo.memory(compiled))
    capacity = int(SPARE * deviceless.TARGETS[target].memory_bytes)
    return dict(
        gpu=devices[0].device_kind,
        gpus=len(devices),
        layout=layout(program),
        program=program.fingerprint(),
        program_on_cpus=on_cpus(config),
        attention=program.attention(),
        **held,
        capacity_bytes=capacity,
        fits=held["total_bytes"] <= capacity,
        **facts(found, program, taken),
        spills=deviceless.spills(),
        compile_s=round(seconds, 1),
        flags=xla_flags.options() | deviceless.asked_flags(),
    )


def facts(found: list, program: Any, taken: Callable[[str], float]) -> dict[str, Any]:
    """What the instructions of the compiled program do on one GPU."""
    from parallel import gpu_program

    return dict(
        parameter_copies_per_step=round(parameter_copies(found, program, taken), 2),
        matmul_flops=round(gpu_program.matmul_flops(found, taken)),
        collectives=gpu_program.collectives(found, program.mesh.shape, taken),
        kernels=gpu_program.kernels(found, taken),
    )


def layout(program: Any) -> dict[str, Any]:
    """How the step is laid out over the GPUs."""
    c, t = program.config, program.table
    return c.mesh.sizes() | dict(
        schedule=t.name, chunks=t.chunks, microbatches=t.microbatches, rows=c.batch.rows, length=c.batch.length,
        layers_per_chunk=program.layout.slots, layers_unrolled=program.plan.unroll, remat=c.pipeline.remat, zero=c.zero,
        idle=program.idle,
    )  # fmt: skip


def share(program: Any) -> Callable[[str], float]:
    """How often the executor's conditionals do their work: each joint one (embedding, vocabulary, its gradient) once a
    microbatch, and in skip mode each slot once a microbatch and chunk, over the ticks that ask."""
    t, everything = program.tick_table, [(0, program.tick_table.length, (True, True, True))]
    phases = everything if program.idle == "skip" else t.phases()
    ticks = [sum(stop - start for start, stop, held in phases if held[i]) for i in range(3)]
    m, chunks = program.table.microbatches, program.table.chunks
    asked = {f"{scope}/cond": m / max(ticks[i], 1) for scope, i in (("enter", 0), ("leave", 0), ("exit", 1))}
    slots = {f"{slot}_slot/cond": min(1.0, m * chunks / max(ticks[i], 1)) for i, slot in enumerate("fbw")}

    def taken(source: str) -> float:
        return next((value for scope, value in (asked | slots).items() if scope in source), 1.0)

    return taken


def whole_shard(program: Any, spec: Any) -> tuple[int, ...]:
    """Dimensions of a GPU's part of a parameter as compute sees it: whole over `data`."""
    from jax.sharding import NamedSharding

    from parallel.sharding import memory_shape, partition

    sizes = program.mesh.shape
    where = NamedSharding(program.mesh, partition(spec, sizes))
    return where.shard_shape(memory_shape(spec, program.layout, sizes))


def held_bytes(program: Any, memory: Any) -> dict[str, int]:
    """Bytes on one GPU by what they hold; temporary: activations, the compute copy of the weights and work space."""
    import jax

    state = program.arguments[0]
    share = lambda a: math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
    parameters, optimizer = (sum(share(a) for a in jax.tree.leaves(state[name])) for name in ("params", "optimizer"))
    gradients = sum(4 * math.prod(whole_shard(program, spec)) for spec in jax.tree.leaves(program.specs))
    everything = memory.arguments + memory.results - memory.aliased + memory.temporaries
    return dict(
        parameter_bytes=parameters,
        optimizer_bytes=optimizer,
        gradient_bytes=gradients,
        temporary_bytes=everything - parameters - optimizer - gradients,
        total_bytes=everything,
    )


def parameter_copies(found: list, program: Any, taken: Callable[[str], float]) -> float:
    """How often a step writes the layers' matrices of a GPU in compute precision: once for the cast and gather before the
    ticks, and what slots copy out of the stack of all chunks."""
    from parallel import gpu_program, hlo

    stacks = weight_stacks(program)
    copied = sum(c.bytes * gpu_program.times(c, taken) for c in gpu_program.parameter_copies(found, stacks))
    return 1 + copied / sum(hlo.bytes_of(*stack) for stack in stacks)


def weight_stacks(program: Any) -> list[tuple[str, tuple[int, ...]]]:
    """(type, dimensions [chunks, slots, ...]) of the stacked matrices of a GPU, as the slots read them."""
    import jax

    matrices = [spec for spec in jax.tree.leaves(program.specs["layers"]) if spec.kind != "vector"]
    dtype = {"float32": "f32", "bfloat16": "bf16"}[program.config.train.dtype]
    return [(dtype, (chunks, *rest)) for chunks, _, *rest in (whole_shard(program, spec) for spec in matrices)]


def on_cpus(config: Config) -> str | None:
    """The fingerprint that `train` prints for this configuration on CPU devices, up to a number of them."""
    import jax

    from llm.step import build

    devices = jax.devices("cpu")
    try:
        return build(config, devices[: config.mesh.product]).fingerprint() if len(devices) >= config.mesh.product else None
    except UserError:  # an attention kernel that CPUs have not
        return None


def command(options: Any) -> tuple[dict[str, Any], str, int]:
    """Runs the compile command: (document, text, exit code)."""
    from llm import overrides
    from llm.plan import count

    if not options.config:
        raise UserError("compile needs --config=FILE, for example --config=experiments/configs/llama3_8b.py")
    config = overrides.apply(overrides.load(options.config), options.changes)
    gpus = count(options.gpus, "gpus") if options.gpus else 0
    shown: list[float] = []
    try:
        progress = lambda seconds: shown.append(seconds) or show_progress(seconds)
        document = compile_step(config, options.cluster, gpus, progress, options.changes)
    finally:
        if shown:
            print(file=sys.stderr)
    return document, table(document), 0 if document["fits"] else FitError.code


def show_progress(seconds: float) -> None:
    """One line on stderr that counts the seconds."""
    print(f"\rcompiling: {seconds:.0f} s", end="", file=sys.stderr, flush=True)


def table(document: dict[str, Any]) -> str:
    """The document for people."""
    gib = lambda size: f"{size / 2**30:,.2f} GiB"
    d, axes = document, MeshConfig().sizes()
    holders = ("parameter", "optimizer", "gradient", "temporary", "total")
    mesh = " x ".join(f"{axis} {d['layout'][axis]}" for axis in axes if d["layout"][axis] > 1) or "1 GPU"
    layers = f"{d['layout']['layers_per_chunk']} {'unrolled' if d['layout']['layers_unrolled'] else 'looped'} layers a chunk"
    own = f"{d['program']}" + (f" (on CPUs {d['program_on_cpus']})" if d["program_on_cpus"] else "")
    lines = [
        f"{d['gpus']:,} {d['gpu']}: {mesh}",
        "{schedule}, {chunks} chunks a rank, {microbatches} microbatches, remat {remat}, ZeRO {zero}, ".format(**d["layout"])
        + f"{d['layout']['idle']} mode, {layers}",
        f"attention  {d['attention']}",
        f"program    {own}, compiled in {d['compile_s']:.0f} s",
        "",
        "Memory of a GPU",
        *(f"  {name:<24}{gib(d[f'{name}_bytes']):>14}" for name in holders),
        f"  {'capacity':<24}{gib(d['capacity_bytes']):>14}  {'fits' if d['fits'] else 'DOES NOT FIT'}",
        "",
        f"Matrix products           {d['matmul_flops'] / 1e12:,.1f} TFLOP a step on each GPU",
        f"Copies of the weights     {d['parameter_copies_per_step']:.2f} a step",
        "",
        f"  {'collective':<20}{'axis':<20}{'count':>8}{'bytes':>16}  where",
    ]
    for row in d["collectives"]:
        where = ("in the ticks" if row["in_loop"] else "once a step") + (", behind compute" if row["overlapped"] else "")
        lines.append(f"  {row['kind']:<20}{row['axis']:<20}{row['count']:>8,}{gib(row['bytes']):>16}  {where}")
    lines += ["", f"  {'kernel':<40}{'count':>8}", *(f"  {row['name']:<40}{row['count']:>8,}" for row in d["kernels"])]
    worst = "; ".join(f"{row['kernel']} {row['bytes']} bytes" for row in d["spills"][:3])
    lines += ["", f"Kernels that spill registers: {len(d['spills'])}" + (f" ({worst})" if worst else "")]
    return "\n".join([*lines, "Flags: " + " ".join(f"--{name}={str(value).lower()}" for name, value in d["flags"].items())])
