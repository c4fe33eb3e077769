"""Checkpoints: any layout reads any other, and which steps stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llm.checkpoint
from llm.arrays import BLOCK, Info, Saved
from llm.checkpoint import Checkpoints, kept, names, read, writing
from parallel.errors import CheckError, UserError
from parallel.sharding import Stored
from tests.llm.states import LAYERS, LAYOUTS, VOCAB, WIDTH, Setup, assert_equal, canonical, save


@pytest.mark.smoke
@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_layout_reads_every_other(writer, setups, tmp_path):
    save(tmp_path, setups[writer], 3)
    for setup in setups.values():
        got = Checkpoints(tmp_path, 1).restore(3, setup.abstract, setup.stored)
        assert_equal(got, setup.expected(3))
        for leaf, abstract in zip(jax.tree.leaves(got), jax.tree.leaves(setup.abstract)):
            assert leaf.sharding == abstract.sharding and leaf.dtype == abstract.dtype


@pytest.mark.parametrize("numbers", [1, 2 * WIDTH + 1])
def test_piece_by_piece(numbers, setups, tmp_path, monkeypatch):
    """Leaves that reach the devices in single layers, or in a few rows and overlapping ends."""
    save(tmp_path, setups["pipe4"], 3)
    monkeypatch.setattr("llm.arrays.PIECE", 4 * 8 * numbers)
    for name in ("one", "v placement", "by hand"):
        got = Checkpoints(tmp_path, 1).restore(3, setups[name].abstract, setups[name].stored)
        assert_equal(got, setups[name].expected(3))


def test_the_files_do_not_depend_on_the_layout(setups, tmp_path):
    """The layout on disk: names, shapes, chunks and every byte."""
    contents = []
    for name, setup in setups.items():
        save(tmp_path / name, setup, 3)
        state = tmp_path / name / "3" / "state"
        files = {str(f.relative_to(state)): f.read_bytes() for f in state.rglob("*") if f.is_file()}
        contents.append({k: v for k, v in files.items() if k != "commit_success.txt"})  # orbax's, names the folder
    assert all(content == contents[0] for content in contents)
    assert {"params/block/query/zarr.json", "params/block/query/c/6/0/0/0", "params/embedding/c/0/0"} <= set(contents[0])
    assert {"optimizer/muon/mu/block/query/c/0/0/0/0", "optimizer/adam/nu/embedding/c/0/0", "step/c"} <= set(contents[0])
    found = names(tmp_path / "one", 3)
    assert found["params/block/query"].shape == (LAYERS, WIDTH, 4, 2) and found["params/block/query"].dtype == "float32"
    assert found["params/embedding"].shape == (VOCAB, WIDTH) and found["step"].shape == ()


def test_reads_a_subtree(setups, tmp_path):
    save(tmp_path, setups["pipe2 v2"], 3)
    setup = setups["pipe4"]
    params = lambda tree: {"params": {"block": tree["params"]["block"]}}
    got = Checkpoints(tmp_path, 1).restore(3, params(setup.abstract), params(setup.stored))
    assert_equal(got, params(setup.expected(3)))


def test_reads_one_layer_without_a_mesh(setups, tmp_path):
    save(tmp_path, setups["pipe2 v3 data2 zero"], 3)
    whole = read(tmp_path, 3, "params/block/query")
    np.testing.assert_array_equal(whole, canonical("params/block/query", whole.shape, np.float32, 3))
    for layer in (0, 6):
        np.testing.assert_array_equal(read(tmp_path, 3, "params/block/query", layer), whole[layer])
    assert read(tmp_path, 3, "step") == canonical("step", (), np.int32, 3)
    with pytest.raises(UserError, match="no layer 7"):
        read(tmp_path, 3, "params/block/query", 7)
    with pytest.raises(UserError, match=r"no array params/q; it has .*params/block/query"):
        read(tmp_path, 3, "params/q")
    with pytest.raises(UserError, match=r"step 4 .*no such step"):
        read(tmp_path, 4, "step")


def test_restores_without_shardings_on_one_device(setups, tmp_path):
    save(tmp_path, setups["pipe4 v2 tensor2"], 3)
    setup = setups["one"]
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), setup.abstract)
    got = Checkpoints(tmp_path, 1).restore(3, abstract, setup.stored)
    assert_equal(got, setup.expected(3))
    assert {leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(got)} == {True}


def test_writes_layer_by_layer_without_a_mesh(setups, tmp_path):
    save(tmp_path / "a", setups["pipe2 v2"], 3)
    infos = Saved.open(tmp_path / "a" / "3" / "state", "a").infos
    with writing(tmp_path / "b", 5, infos, {"step": 5}) as put:
        for name, info in infos.items():
            value = read(tmp_path / "a", 3, name)
            if len(info.shape) > 1 and info.rows == 1:
                for layer in range(info.shape[0]):
                    put(name, value[layer], layer)
            else:
                put(name, value)
    setup = setups["pipe4"]
    assert_equal(Checkpoints(tmp_path / "b", 1).restore(5, setup.abstract, setup.stored), setup.expected(3))
    save(tmp_path / "b", setup, 6, keep=2)  # the manager sees and keeps it
    assert Checkpoints(tmp_path / "b", 1).steps() == [5, 6]
    with pytest.raises(UserError, match="exists"), writing(tmp_path / "b", 5, infos, {}):
        pass
    one = {"params/block/norm": infos["params/block/norm"]}
    with pytest.raises(ValueError, match="belongs"), writing(tmp_path / "b", 7, one, {}) as put:
        put("params/block/norm", np.zeros(3), 0)
    with pytest.raises(CheckError, match="missing"), writing(tmp_path / "b", 7, one, {}) as put:
        put("params/block/norm", np.zeros(WIDTH), 0)
    assert Checkpoints(tmp_path / "b", 1).steps() == [5, 6]


@pytest.mark.parametrize("saved, wanted", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_dtype_may_differ(saved, wanted, setups, tmp_path):
    setup = setups["pipe2 v2"]
    cast = lambda dtype: lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    checkpoints = Checkpoints(tmp_path, 1)
    state = jax.tree.map(cast(saved), setup.state())
    checkpoints.save(3, state, setup.stored, {})
    checkpoints.wait()
    assert names(tmp_path, 3)["params/norm"].dtype == saved
    abstract = jax.tree.map(
        lambda leaf, x: jax.ShapeDtypeStruct(leaf.shape, cast(wanted)(x).dtype, sharding=leaf.sharding),
        setup.abstract,
        state,
    )
    got = checkpoints.restore(3, abstract, setup.stored)
    assert_equal(got, jax.tree.map(cast(wanted), state))
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(abstract)]


def test_keeps_the_newest(setups, tmp_path):
    save(tmp_path, setups["one"], 100, 200, 300, keep=3)
    save(tmp_path, setups["one"], 400, 500, keep=3)
    assert Checkpoints(tmp_path, 3).steps() == [300, 400, 500]
    assert Checkpoints(tmp_path, 3).latest() == 500
    save(tmp_path, setups["one"], 600, keep=1)
    assert Checkpoints(tmp_path, 3).steps() == [600]


@pytest.mark.smoke
def test_which_steps_stay():
    nan, inf = float("nan"), float("inf")
    rising = {100: 1.0, 200: 2.0, 300: 3.0, 400: 4.0, 500: 5.0}
    assert kept(rising, 2, 1) == {100, 400, 500} and kept(rising, 1, 0) == {500}
    assert kept(rising, 1, 2) == {100, 200, 500} and kept(rising, 9, 9) == set(rising)
    assert kept({1: nan, 2: None, 3: -inf, 4: 2.0, 5: nan}, 1, 3) == {4, 5}
    assert kept({1: nan, 2: None, 3: "x"}, 1, 1) == {3}
    assert kept({}, 1, 1) == set()


def test_keeps_the_newest_and_the_best(setups, tmp_path):
    setup = setups["one"]
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 4.0, 60: 5.0}
    for part in ((10, 20, 30), (40, 50, 60)):  # in two processes, so to say
        checkpoints = Checkpoints(tmp_path, keep=1, best=2)
        for step in part:
            checkpoints.save(step, setup.state(), setup.stored, {"eval_loss": losses[step]})
        checkpoints.close()
    assert Checkpoints(tmp_path, 1).steps() == [20, 30, 60]
    checkpoints = Checkpoints(tmp_path, 3)
    checkpoints.delete(30)
    checkpoints.save(30, setup.state(7), setup.stored, {})
    checkpoints.close()
    assert Checkpoints(tmp_path, 1).steps() == [20, 30, 60]
    assert_equal(checkpoints.restore(30, setup.abstract, setup.stored), setup.expected(7))


def test_meta_is_exact(setups, tmp_path):
    """Counters beyond 32 and 64 bits, as plain JSON."""
    meta = {"tokens": 2**31 + 5, "rows": 700_000 * 3072, "big": 2**70, "lr": 0.1, "name": "é", "list": [1, None, True]}
    checkpoints, setup = Checkpoints(tmp_path, 1), setups["one"]
    with pytest.raises(TypeError):
        checkpoints.save(3, setup.state(), setup.stored, {"tokens": np.int64(3)})
    checkpoints.save(3, setup.state(), setup.stored, meta)
    checkpoints.wait()
    assert checkpoints.meta(3) == meta and type(checkpoints.meta(3)["tokens"]) is int


def test_donation_changes_nothing(setups, tmp_path):
    """save returns after the copy: the next step may write into the same memory. So may a step after restore."""
    setup, checkpoints = setups["pipe2 v3 data2 zero"], Checkpoints(tmp_path, 2)
    state = setup.state()
    double = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state), donate_argnums=0)
    for step in range(3):
        checkpoints.save(step, state, setup.stored, {})
        state = double(state)
    checkpoints.wait()
    restored = [checkpoints.restore(2, setup.abstract, setup.stored) for _ in range(2)]
    for got, factor in ((double(restored[0]), 8), (restored[1], 4)):
        for leaf, value in zip(jax.tree.leaves(got), jax.tree.leaves(setup.expected())):
            for shard in leaf.addressable_shards:  # of every replica
                np.testing.assert_array_equal(shard.data, (value * factor)[shard.index])


def test_saving_a_saved_step_is_a_warning(setups, tmp_path, caplog):
    save(tmp_path, setups["one"], 3)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(3, setups["one"].state(9), setups["one"].stored, {})
    checkpoints.close()
    assert "already saved" in caplog.text
    assert_equal(Checkpoints(tmp_path, 1).restore(3, setups["one"].abstract, setups["one"].stored), setups["one"].expected(3))


def test_another_model_is_refused(setups, tmp_path):
    save(tmp_path, setups["one"], 3)
    other = Setup(layers=5)
    with pytest.raises(UserError, match=r"has shape \(7, 8, 4, 2\) and the model wants \(5, 8, 4, 2\)"):
        Checkpoints(tmp_path, 1).restore(3, other.abstract, other.stored)
    adamw = Setup(optimizer="adamw")
    with pytest.raises(UserError, match="no array optimizer/adam/mu/block/query"):
        Checkpoints(tmp_path, 1).restore(3, adamw.abstract, adamw.stored)


def test_slots_must_hold_each_layer_once(setups, tmp_path):
    value = {"w": jax.device_put(np.zeros((1, 1, 2, 3), np.float32))}
    for index in ([[[0, 0]]], [[[0, -1]]]):
        with pytest.raises(ValueError, match="each of 2 layers once"):
            Checkpoints(tmp_path, 1).save(3, value, {"w": Stored((2, 3), np.array(index))}, {})
    with pytest.raises(ValueError, match="does not hold"):
        Checkpoints(tmp_path, 1).save(3, value, {"w": Stored((2, 4), np.array([[[0, 1]]]))}, {})


def test_large_arrays_are_cut_by_rows():
    info = Info.of((50257, 768), "float32", stacked=False)
    assert info.rows * 768 <= BLOCK < (info.rows + 1) * 768 and info.chunks == 10
    assert info.region(9) == (slice(9 * info.rows, 50257), slice(0, 768))
    assert Info.of((3, 2 * BLOCK), "float32", stacked=False).rows == 1
    assert Info.of((32, 4096, 8, 128), "bfloat16", stacked=True).chunk_shape == (1, 4096, 8, 128)
    assert Info.of((), "int32", stacked=False).chunk_shape == ()


def test_chunks_of_rows_between_shards(setups, tmp_path, monkeypatch):
    """Shards that end inside a chunk: each chunk is put together once, whatever holds its parts."""
    monkeypatch.setattr("llm.arrays.BLOCK", 3 * WIDTH)
    for writer in ("pipe4 v2 tensor2", "one", "v placement"):
        save(tmp_path / writer, setups[writer], 3)
        assert len(list((tmp_path / writer / "3/state/params/embedding/c").iterdir())) == 4
        for reader in ("replica2 data2 tensor2 zero", "pipe4"):
            got = Checkpoints(tmp_path / writer, 1).restore(3, setups[reader].abstract, setups[reader].stored)
            assert_equal(got, setups[reader].expected(3))


def test_parts_of_a_chunk_from_two_writers(setups, tmp_path):
    """As two processes would: each writes only what it has of every chunk."""
    values = np.arange(2 * 3 * 8, dtype=np.float32).reshape(1, 1, 2, 3, 8)
    info, form = Info.of((2, 3, 8), "float32", stacked=True), Stored((2, 3, 8), np.array([[[1, 0]]]))
    for half in (slice(0, 4), slice(4, 8)):
        index = (slice(0, 1), slice(0, 1), slice(0, 2), slice(0, 3), half)
        llm.checkpoint.write_shards(tmp_path, "w", info, form, [(index, values[index])])
    leaf = jax.ShapeDtypeStruct(values.shape, np.float32, sharding=None)
    saved = Saved(tmp_path, "here", {"w": info}, {})
    assert saved.problem() is None
    np.testing.assert_array_equal(saved.restore(["w"], [leaf], [form])[0], values)


def test_nothing_there(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", 2)
    assert checkpoints.steps() == [] and checkpoints.latest() is None
    checkpoints.wait()
    checkpoints.close()
    assert not (tmp_path / "none").exists()
