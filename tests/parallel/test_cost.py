"""What a training step costs, read from traced and compiled programs: memory, communication, matmuls. Nothing runs.

Programs are small; each is traced and compiled once. Sizes of the model's dimensions differ, so that a shape tells what
an array is."""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from llm.model import REMAT, Transformer
from llm.step import Program, build
from parallel import hlo, schedule
from parallel.axes import BATCH_AXES
from parallel.schedule.registry import SCHEDULES
from parallel.schedule.slots import CLASSES, lower
from parallel.split import count_matmuls, split

MODEL = ModelConfig(layers=8, width=16, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=64)


def program(mesh: dict, rows: int = 8, length: int = 32, **parts) -> Program:
    """A program of the small model; parts: changes of a configuration's fields, as in reference.replace."""
    config = Config(MODEL, MeshConfig(**mesh), PipelineConfig(idle="skip"), BatchConfig(rows, length))
    config = reference.replace(config, **parts)
    return build(config, jax.devices()[: config.mesh.product])


def arguments(program: Program) -> tuple:
    """What the training step is given, as shapes with shardings: state, batch, table."""
    m, (rows, length) = program.config.pipeline.microbatches, program.batch_shape
    of = lambda a: jax.ShapeDtypeStruct((m, rows // m, *a.shape[1:]), a.dtype, sharding=program.batch_sharding)
    batch = {name: of(a) for name, a in reference.batch(rows, length, program.config.model.vocab).items()}
    at = dict(ranks=P(None, "pipe"), joint=P())
    table = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(program.mesh, at[name]))
        for name, a in program.plan.table.items()
    }
    return program.abstract_state(), batch, table


def trace(program: Program):
    """The traced training step: `.jaxpr`, `.lower().compile()`."""
    step, given = program.compiled_train_step, arguments(program)
    with jax.set_mesh(program.mesh):
        return step.trace(*given)


def compile_step(program: Program):
    traced = trace(program)
    with jax.set_mesh(program.mesh):
        return traced.lower().compile()


# ------------------------------------------------------------------------------------------- memory against microbatches
@functools.cache
def temporaries(name: str, backward: str, idle: str, microbatches: int) -> int:
    """Bytes beside arguments and results; one row a microbatch, so that only their number changes. (Rows of the tick
    table, an argument, are copied out in phases: the activations are large enough for that not to count.)"""
    parts = dict(schedule=name, backward=backward, idle=idle, microbatches=microbatches)
    return hlo.memory(compile_step(program(dict(pipe=4), microbatches, 64, pipeline=parts))).temporaries


@pytest.mark.parametrize(
    "name, backward, idle",
    [
        ("1f1b", "whole", "skip"),
        ("eager-1f1b", "split", "skip"),
        ("interleaved", "split", "skip"),
        ("interleaved", "split", "compute"),
    ],
)
def test_memory_does_not_grow_with_microbatches(name, backward, idle):
    few, many = (temporaries(name, backward, idle, m) for m in (8, 32))
    assert abs(many - few) < 0.01 * few


def test_memory_of_gpipe_grows_with_microbatches():
    few, many = (temporaries("gpipe", "whole", "skip", m) for m in (8, 32))
    assert many > 2 * few


@pytest.mark.parametrize("idle", ["skip", "compute"])
@pytest.mark.parametrize("name", ["eager-1f1b", "interleaved"])
def test_the_program_does_not_grow_with_microbatches(name, idle):
    parts = dict(schedule=name, backward="split", idle=idle)
    counts = [
        hlo.count_equations(trace(program(dict(pipe=4), m, pipeline=dict(parts, microbatches=m))).jaxpr) for m in (8, 128)
    ]
    assert counts[0] == counts[1] > 500


# ------------------------------------------------------------------------------------------- stashes
@pytest.mark.parametrize("name", [name for name, s in SCHEDULES.items() if s.executable])
def test_slots_are_the_peaks_of_the_tick_simulator(name):
    for p, m in ((1, 3), (2, 6), (4, 8), (4, 13)):
        for backward in ("whole", "split"):
            try:
                ticks = schedule.pack(schedule.make(name, p, m, backward=backward))
            except schedule.ScheduleError:
                continue
            peaks = ticks.peaks()
            assert lower(ticks).slots == {kind: peaks.get(kind, 0) for kind in CLASSES}, (p, m, backward)


def cut_layer(program: Program, remat: str, fused: bool):
    """(layer with that remat, its arguments, its three programs) for a microbatch of one row."""
    c, length = program.config, program.batch_shape[1]
    layer = Transformer(c.model).layer
    if REMAT[remat] is not None:
        keep = jax.checkpoint_policies.save_only_these_names(*REMAT[remat])
        layer = jax.checkpoint(layer, policy=keep)
    w = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), program.specs["layers"])
    side = {name: a for name, a in reference.batch(1, length, c.model.vocab).items() if name != "example"}
    ctx = jnp.int32(0), side | {"key": jnp.zeros((1, 2), jnp.uint32)}
    x = jax.ShapeDtypeStruct((1, length, c.model.width), jnp.float32)
    return layer, (w, ctx, x), split(layer, w, ctx, {}, x, {}, fused=fused)


@pytest.mark.parametrize("name, backward", [("interleaved", "split"), ("1f1b", "whole")])
def test_the_step_allocates_these_slots(name, backward):
    """What the loop over ticks carries: each residual once, with a slot for each that lives and one waste bin."""
    one = program(dict(pipe=4), pipeline=dict(schedule=name, backward=backward, microbatches=8))
    peaks, slots = one.tick_table.peaks(), one.layout.slots
    (carried,) = [
        [v.aval for v in e.invars]
        for e, around in hlo.equations(trace(one).jaxpr)
        if e.primitive.name == "scan" and e.params["length"] == one.tick_table.length and around[-1] == "shard_map"
    ]
    cut = cut_layer(one, "selective", backward == "whole")[2]
    wanted = [(peaks[kind] + 1, slots, *a.shape) for kind in CLASSES[:3] for a in getattr(cut, kind)]
    wanted += [(peaks[kind] + 1, 1, one.batch_shape[1], MODEL.width) for kind in ("x", "g")]
    found = Counter(a.shape for a in carried)
    assert wanted and all(found[shape] == n for shape, n in Counter(wanted).items()), (Counter(wanted), found)


# ------------------------------------------------------------------------------------------- matmuls
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_f_b_and_w_have_the_matmuls_of_a_plain_vjp(mlp, remat, fused):
    layer, (w, ctx, x), cut = cut_layer(program(dict(pipe=2), model=dict(mlp=mlp)), remat, fused)

    def plain(w, x, dy):
        y, pull = jax.vjp(lambda w, x: layer(w, ctx, {}, x)[0], w, x)
        return y, pull(dy)

    assert sum(cut.matmuls) == count_matmuls(plain, w, x, x)
    assert cut.matmuls[2] == (0 if fused else 6 + (mlp == "swiglu"))  # W has one for each matrix and nothing else


# ------------------------------------------------------------------------------------------- communication
EVERY = dict(data=2, pipe=2, tensor=2)


def leaves(program: Program) -> list:
    return jax.tree.leaves(program.specs)


def of_weights(requests: list[hlo.Request]) -> list[hlo.Request]:
    """Those over a batch axis that are no scalars (the loss and the number of tokens are)."""
    return [r for r in requests if set(r.axes) & set(BATCH_AXES) and r.shape]


def test_zero_gathers_weights_once_in_compute_precision_and_scatters_gradients_once():
    one = program(EVERY, train=dict(dtype="bfloat16"))
    assert all(one.plan.zero_dim(spec) is not None for spec in leaves(one))
    found = of_weights(hlo.requests(trace(one).jaxpr))
    assert not any(r.looped for r in found)
    shares = [math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(one.abstract_state()["params"])]
    dtypes = ["float32" if spec.kind == "vector" else "bfloat16" for spec in leaves(one)]
    asked = {kind: Counter() for kind in ("all_gather", "reduce_scatter")}
    for r in found:
        asked[r.primitive][r.dtype, math.prod(r.shape)] += 1
    assert asked["all_gather"] == Counter(zip(dtypes, shares))
    assert asked["reduce_scatter"] == Counter(("float32", EVERY["data"] * share) for share in shares)


def test_without_zero_each_gradient_is_summed_once():
    one = program(dict(replica=2, data=2, pipe=2), zero=0)
    found = of_weights(hlo.requests(trace(one).jaxpr))
    assert {r.primitive for r in found} == {"psum"} and not any(r.looped for r in found)
    assert len(found) == len(leaves(one)) and all({"replica", "data"} <= set(r.axes) for r in found)


def test_compiled_step_communicates_over_data_only_outside_the_ticks():
    one = program(EVERY)
    found = hlo.collectives(compile_step(one).as_text())
    sizes = one.mesh.shape
    over_data = [c for c in found if "data" in c.axes(sizes)]
    assert over_data and not any(c.loops for c in over_data)
    results = Counter()
    for c in over_data:
        results[c.kind] += sum(1 for _, dims in c.results if dims)
    assert results == {"all-gather": len(leaves(one)), "reduce-scatter": len(leaves(one)), "all-reduce": 0}
    # the partitioner must not gather weights or gradients over tensor for it, nor anything over pipe
    outside = [c for c in found if not c.loops and c not in over_data]
    assert all(not dims for c in outside for _, dims in c.results)
    in_ticks = [c for c in found if c.loops]
    assert {c.kind for c in in_ticks if "pipe" in c.axes(sizes) and not c.branches} == {"collective-permute"}
    widest = one.batch_shape[1] * MODEL.width * 4  # a microbatch on a device has one row
    assert all(4 * math.prod(dims) <= widest for c in in_ticks for _, dims in c.results)


# ------------------------------------------------------------------------------------------- state
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_zero_splits_the_optimizer_state(optimizer):
    """Bytes per device fall to 1/data, but for counters and the leaves that have no dimension that divides."""
    model = dict(width=512, heads=2, head_dim=34, ffn=1024, layers=4, bias=True)
    tiny = 16  # bytes of a counter
    whole_leaves = {4 * 2 * 2 * 34}  # a bias of two heads of 34, in two chunks: 4 divides no dimension

    def shares(data: int, zero: int) -> list[int]:
        one = program(dict(pipe=2, data=data), model=model, zero=zero, optimizer=dict(name=optimizer))
        state = jax.tree.leaves(one.abstract_state()["optimizer"])
        return [math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in state]

    whole = shares(1, 1)
    assert shares(4, 0) == whole
    assert shares(2, 1) == [n if n < tiny else n // 2 for n in whole]
    assert shares(4, 1) == [n if n < tiny or n in whole_leaves else n // 4 for n in whole]
    assert sum(shares(4, 1)) < 1.01 * sum(whole) / 4


@pytest.mark.parametrize("mesh", [dict(pipe=4), dict(tensor=4), dict(data=4), dict(data=2, pipe=2, tensor=2)], ids=str)
def test_initialisation_needs_little_more_than_the_state(mesh):
    one = program(mesh, model=dict(width=64, vocab=512, ffn=256))
    init = one.compiled_init
    with jax.set_mesh(one.mesh):
        compiled = init.lower().compile()
    memory, share = hlo.memory(compiled), one.bytes_per_device()
    assert share <= memory.results < 1.01 * share
    assert memory.temporaries < 2 * share
    assert sum(c.bytes for c in hlo.collectives(compiled.as_text())) < 0.01 * share


def of_muon(mesh: dict, layers: int, chunks: int, zero: int = 1) -> tuple[Program, list[hlo.Collective]]:
    """(program, what the compiled update of Muon communicates but for scalars)."""
    schedule = dict(schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks)
    one = program(mesh, optimizer=dict(name="muon"), model=dict(layers=layers), pipeline=schedule, zero=zero)
    state, scalar = one.abstract_state(), jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(one.mesh, P()))
    with jax.set_mesh(one.mesh):
        step = jax.jit(one.apply, out_shardings=(one.shardings, None))
        compiled = step.lower(state, dict(loss=scalar, tokens=scalar), state["params"]).compile()
    return one, [c for c in hlo.collectives(compiled.as_text()) if any(dims for _, dims in c.results)]


@pytest.mark.parametrize(
    "mesh, layers, chunks",
    [
        (dict(data=2), 4, 1),
        (dict(data=2), 6, 3),
        (dict(data=4), 6, 1),
        (dict(data=4), 2, 1),
        (dict(data=2, pipe=2), 6, 1),
        (dict(data=2, pipe=2), 2, 1),
    ],
    ids=str,
)
def test_muon_with_zero_exchanges_each_matrix_once(mesh, layers, chunks):
    """Nothing where `data` divides chunks or slots; else layers go to the rank that computes them and back, which is no more
    than one gather of all but for the padding of an odd number; a single layer is gathered."""
    one, found = of_muon(mesh, layers, chunks)
    of_rank, data = layers // mesh.get("pipe", 1), mesh["data"]
    of_layer = sum(4 * math.prod(s.shape) for s in leaves(one) if s.kind == "matrix")
    divides = chunks % data == 0 or of_rank // chunks % data == 0
    wanted = 0 if divides else 1 if of_rank == 1 else 2 * math.ceil(of_rank / data)
    assert sum(c.bytes for c in found) == wanted * of_layer <= (of_rank + of_rank % 2) * of_layer
    assert all(c.axes(one.mesh.shape) == ("data",) for c in found)


@pytest.mark.parametrize("zero", [0, 1])
def test_muon_exchanges_each_matrix_once_over_tensor_too(zero):
    one, found = of_muon(EVERY, 6, 1, zero)
    of_layer = sum(4 * math.prod(s.shape) for s in leaves(one) if s.kind == "matrix")
    assert one.layout.slots == 3 and {c.kind for c in found} == {"all-to-all"}
    assert sum(c.bytes for c in found) == 2 * math.ceil(3 / (4 if zero else 2)) * of_layer
    assert all(c.axes(one.mesh.shape) == (("data", "tensor") if zero else ("tensor",)) for c in found)


# ------------------------------------------------------------------------------------------- tensor, and the loop over ticks
NO_LAYOUT = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")
"""Instructions that write nothing: what they hand on lies where it was."""


@functools.cache
def over_tensor(tensor: int):
    """(program, instructions, temporaries) with three layers in each of two chunks a rank, and a wide inside of layers."""
    model = dict(layers=12, width=8, heads=28, kv_heads=14, head_dim=6, ffn=200)
    one = program(dict(pipe=2, tensor=tensor), 8, 16, model=model, pipeline=dict(microbatches=8))
    compiled = compile_step(one)
    return one, hlo.instructions(compiled.as_text()), hlo.memory(compiled).temporaries


def test_stashes_and_gradients_are_split_over_tensor():
    """What the loop over ticks carries of heads, MLP and vocabulary: all is halved by tensor=2."""
    (_, whole, much), (_, half, little) = over_tensor(1), over_tensor(2)
    ways = {28: 14, 14: 7, 200: 100, MODEL.vocab // 2: MODEL.vocab // 4}
    halves = lambda shape: tuple(ways.get(n, n) for n in shape)
    carried, expected = (
        {dims for i in found if i.kind == "while" and not i.loops for dtype, dims in i.results if dtype == "f32"}
        for found in (half, whole)
    )
    split = {shape for shape in expected if halves(shape) != shape}
    assert len(split) >= 8 and {halves(shape) for shape in split} <= carried
    assert not (split - {halves(shape) for shape in split}) & carried
    assert little < 0.6 * much


def test_nothing_of_a_chunk_is_copied():
    """In a slot, weights, residuals and gradients are read and written one layer at a time; each gradient in one place."""
    one, found, _ = over_tensor(1)
    matrices = [s.shape for s in jax.tree.leaves(one.specs["layers"]) if s.kind == "matrix"]
    cut = cut_layer(one, "selective", False)[2]
    residuals = [a.shape for kind in CLASSES[:3] for a in getattr(cut, kind)]
    slots, chunks = one.layout.slots, one.table.chunks
    written = Counter(dims for i in found if i.loops and not i.fused and i.kind not in NO_LAYOUT for _, dims in i.results)
    copies = [shape for shape in {*matrices, *residuals} for lead in ((), (1,)) if written[*lead, slots, *shape]]
    assert (slots, chunks) == (3, 2) and not copies
    for shape, n in Counter(matrices).items():
        assert written[chunks, slots, *shape] == n
