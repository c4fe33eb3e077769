"""Where layers and parameters live: every layer once, padding, what is split over which axis, and equal bits at the start."""

import dataclasses

import jax
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec as P

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from llm.step import build
from parallel.axes import AXES, MANUAL_AXES
from parallel.errors import UserError
from parallel.mesh import make_mesh
from parallel.schedule import place
from parallel.sharding import (
    ParamSpec,
    automatic_part,
    make_layout,
    manual_part,
    memory_shape,
    on_whole,
    pad,
    partition,
    stored,
    with_axis,
    zero_dim,
)

ONE = dict.fromkeys(AXES, 1)
FLAT = make_layout(2, "linear", 1, 1)


def spec(shape, axes, **more) -> ParamSpec:
    return ParamSpec(shape, axes, None, "matrix", **more)


# ----------------------------------------------------------------------------------------------- layers
@pytest.mark.parametrize("placement", ["linear", "loop", "v"])
@pytest.mark.parametrize(("layers", "pipe"), [(7, 2), (7, 3), (10, 3), (30, 4), (3, 4), (1, 1)])
def test_every_layer_is_placed_once_and_in_order(layers, pipe, placement):
    chunks = 1 if placement == "linear" else 2
    layout = make_layout(layers, placement, pipe, chunks)
    index = layout.index_CPL
    assert sorted(index[index >= 0]) == list(range(layers))
    stages = [index[chunk, rank] for rank, chunk in (place(placement, pipe, chunks, s) for s in range(pipe * chunks))]
    assert [int(i) for stage in stages for i in stage if i >= 0] == list(range(layers))
    counts = [int((stage >= 0).sum()) for stage in stages]
    assert max(counts) - min(counts) <= 1
    assert layout.slots == max(1, *counts)
    assert all((stage[:n] >= 0).all() and (stage[n:] < 0).all() for stage, n in zip(stages, counts))
    assert layout.full == (min(counts) == layout.slots)


def test_the_user_may_say_how_many_layers_each_chunk_has():
    layout = make_layout(7, "loop", 2, 2, (3, 0, 1, 3))
    np.testing.assert_array_equal(layout.index_CPL, [[[0, 1, 2], [-1, -1, -1]], [[3, -1, -1], [4, 5, 6]]])
    assert not layout.full
    v = make_layout(7, "v", 2, 2, (3, 0, 1, 3))  # the second chunks run from the last rank to the first
    np.testing.assert_array_equal(v.index_CPL, [[[0, 1, 2], [-1, -1, -1]], [[4, 5, 6], [3, -1, -1]]])


@pytest.mark.parametrize("counts", [(3, 3), (3, 3, 2), (4, -1, 2, 2), (1, 2, 3, 2)])
def test_wrong_numbers_of_layers_are_refused(counts):
    with pytest.raises(UserError, match=rf"{len(counts)} chunks with {sum(counts)} layers.*4 numbers that add up to 7"):
        make_layout(7, "loop", 2, 2, counts)


# ----------------------------------------------------------------------------------------------- shapes and splits
@pytest.mark.parametrize(("tensor", "pipe", "rows"), [(1, 1, 101), (2, 1, 102), (4, 1, 104), (4, 2, 104), (2, 8, 112)])
def test_the_vocabulary_is_padded_until_it_divides(tensor, pipe, rows):
    sizes = ONE | dict(tensor=tensor, pipe=pipe)
    table = spec((101, 16), ("vocab", None))
    assert memory_shape(table, FLAT, sizes) == (rows, 16)
    assert partition(table, sizes) == P(("pipe", "tensor"), None)
    assert stored(table, FLAT).shape == (101, 16)
    assert stored(table, FLAT).index_CPL is None


def test_a_stacked_parameter_has_the_layout_in_front():
    layout = make_layout(7, "loop", 2, 2)
    query = spec((16, 8, 4), (None, "heads", None), stacked=True)
    sizes = ONE | dict(tensor=4, pipe=2, data=2)
    assert memory_shape(query, layout, sizes) == (2, 2, 2, 16, 8, 4)
    assert partition(query, sizes) == P(None, "pipe", None, None, "tensor", None)
    assert stored(query, layout).shape == (7, 16, 8, 4)
    np.testing.assert_array_equal(stored(query, layout).index_CPL, layout.index_CPL)


@pytest.mark.parametrize(("tensor", "split"), [(1, True), (2, True), (4, False), (8, False)])
def test_fewer_kv_heads_than_tensor_ranks_are_replicated(tensor, split):
    sizes = ONE | dict(tensor=tensor)
    key = spec((16, 2, 4), (None, "kv_heads", None), stacked=True)
    assert partition(key, sizes)[4] == ("tensor" if split else None)
    assert memory_shape(key, FLAT, sizes)[3:] == (16, 2, 4)  # never padded
    three = spec((16, 3, 4), (None, "kv_heads", None), stacked=True)
    assert partition(three, ONE | dict(tensor=2))[4] is None


def test_zero_splits_chunks_or_slots_so_that_a_rank_has_whole_layers():
    sizes = ONE | dict(data=2, pipe=2)
    dim = lambda chunks, layers, **more: zero_dim(
        spec((64, 32), (None, None), **more), make_layout(layers, "loop", 2, chunks), sizes, 1
    )
    assert dim(1, 8, stacked=True) == 2  # 4 slots, though 64 is more
    assert dim(4, 8, stacked=True) == 0  # one slot in each of 4 chunks
    assert dim(2, 16, stacked=True) == 2
    assert dim(4, 16, stacked=True) == 0
    assert dim(3, 18, stacked=True) == 3  # 3 slots in 3 chunks
    assert dim(1, 8) == 0


def test_zero_splits_the_largest_whole_dimension_that_divides():
    layout = make_layout(6, "loop", 2, 1)
    sizes = ONE | dict(data=4, tensor=2, pipe=2)
    dim = lambda shape, axes, zero=1, stacked=True: zero_dim(spec(shape, axes, stacked=stacked), layout, sizes, zero)
    assert dim((16, 24), (None, "ffn")) == 3  # ffn is the largest but belongs to tensor
    assert dim((8, 12), (None, None)) == 4
    assert dim((12, 12), (None, None)) == 4
    assert dim((6,), (None,)) is None  # nothing divides
    assert dim((16, 24), (None, "ffn"), zero=0) is None
    assert dim((101, 16), ("vocab", None), stacked=False) == 1
    assert zero_dim(spec((16,), (None,)), layout, ONE, 1) is None
    # chunk and slot dimensions count too: a scalar of each of 4 slots
    assert zero_dim(spec((1,), (None,), stacked=True), make_layout(8, "loop", 2, 1), sizes, 1) == 2


def test_parts_of_a_partition():
    whole = P(None, "pipe", ("data", "tensor"), ("pipe", "tensor"), "tensor")
    assert manual_part(whole, MANUAL_AXES) == P(None, "pipe", "data", "pipe", None)
    assert automatic_part(whole, MANUAL_AXES) == P(None, None, "tensor", "tensor", "tensor")
    assert with_axis(P(None, "pipe", None), 2, "data") == P(None, "pipe", "data")
    assert with_axis(whole, None, "data") == whole
    both = P(("replica", "data"))
    assert manual_part(both, MANUAL_AXES) == both
    assert automatic_part(both, MANUAL_AXES) == P(None)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "parts",
    [
        P(None, "data"),
        P(None, None, "tensor"),
        P(None, "tensor", None, "data"),
        P(None, ("data", "tensor")),
        P(None, "pipe", ("data", "tensor")),
        P(),
    ],
    ids=str,
)
def test_a_function_of_whole_arrays_runs_on_their_parts(parts, count):
    mesh = make_mesh(dict(data=2, pipe=2, tensor=2))
    x = np.arange(count * 4 * 8 * 6, dtype=np.float32).reshape(count, 4, 8, 6)

    def run(x_N):  # each element of an array depends on all those before it, and nothing on another array
        assert x_N.shape[1:] == x.shape[1:]
        return jax.numpy.cumsum(x_N.reshape(len(x_N), -1), 1).reshape(x_N.shape)

    on_parts = jax.shard_map(lambda x: on_whole(run, x, parts), mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    np.testing.assert_array_equal(jax.jit(on_parts)(x), np.cumsum(x.reshape(count, -1), 1).reshape(x.shape))


def test_pad_appends_zeros():
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(pad(x, (3, 4)), [[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    assert pad(x, (2, 3)) is x


# ----------------------------------------------------------------------------------------------- meshes
def test_the_mesh_has_all_axes_and_tensor_varies_fastest():
    mesh = make_mesh(dict(tensor=2, pipe=2, data=2))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == ONE | dict(data=2, pipe=2, tensor=2)
    ids = np.vectorize(lambda d: d.id)(mesh.devices).squeeze()
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))  # data, pipe, tensor


def test_too_few_devices_are_refused():
    with pytest.raises(UserError, match="pipe 3 x tensor 4 needs 12 devices but there are 8"):
        make_mesh(dict(pipe=3, tensor=4))


# ----------------------------------------------------------------------------------------------- initial parameters
MODEL = ModelConfig(layers=3, width=8, heads=2, kv_heads=1, ffn=8, vocab=11, tied=False, bias=True, norm="layer")


def initial(mesh: dict, **pipeline):
    config = Config(
        model=dataclasses.replace(MODEL, positions="learned", max_length=4),
        mesh=MeshConfig(**mesh),
        pipeline=PipelineConfig(**pipeline),
        batch=BatchConfig(rows=8, length=4),
    )
    program = build(config, jax.devices()[: config.mesh.product])
    with jax.set_mesh(program.mesh):
        params = jax.jit(lambda: program._init()["params"], out_shardings=program.shardings["params"])()
    return program, params


def test_every_layout_starts_from_the_same_bits():
    program, params = initial({})
    want = reference.canonical(program, params)
    layers = want["layers"]["up"]["kernel"]
    assert layers.shape == (3, 8, 8)
    assert len({a.tobytes() for a in layers}) == 3, "two layers are equal"
    for mesh, pipeline in (
        (dict(data=2, pipe=2, tensor=2), dict(chunks=2)),
        (dict(replica=2, pipe=4), dict(schedule="1f1b", layers_per_chunk=(1, 0, 2, 0), microbatches=2)),
    ):
        program, params = initial(mesh, **pipeline)
        got = reference.canonical(program, params)
        jax.tree.map(np.testing.assert_array_equal, want, got)
        for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(program.shardings["params"])):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            assert leaf.dtype == np.float32
