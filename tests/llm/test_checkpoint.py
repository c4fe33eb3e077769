"""Checkpoints: any layout reads any other, nothing is lost by a kill, damage is found."""

import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import llm.checkpoint
from llm.arrays import BLOCK, Info, Saved
from llm.checkpoint import Checkpoints, kept, names, read, writing
from llm.optimizer import like_params, make_optimizer
from parallel import sharding
from parallel.errors import CheckError, UserError
from parallel.mesh import make_mesh
from parallel.sharding import ParamSpec, Stored

LAYERS, WIDTH, VOCAB = 7, 8, 11  # 7 layers fit no layout evenly; 11 rows are padded wherever the vocabulary is split


def spec(shape, axes, kind, inputs=(), stacked=True):
    return ParamSpec(shape, axes, lambda key, shape: None, kind, inputs, stacked)


SPECS = {
    "block": {
        "norm": spec((WIDTH,), (None,), "vector"),
        "query": spec((WIDTH, 4, 2), (None, "heads", None), "matrix", (0,)),
    },
    "embedding": spec((VOCAB, WIDTH), ("vocab", None), "embedding", stacked=False),
    "norm": spec((WIDTH,), (None,), "vector", stacked=False),
}

LAYOUTS = {
    "one": {},
    "pipe4": {"pipe": 4},
    "pipe2 v2": {"pipe": 2, "chunks": 2},
    "pipe2 v3 data2 zero": {"pipe": 2, "chunks": 3, "data": 2, "zero": 1},
    "v placement": {"pipe": 2, "chunks": 2, "placement": "v", "tensor": 2},
    "pipe4 v2 tensor2": {"pipe": 4, "chunks": 2, "tensor": 2},
    "replica2 data2 tensor2 zero": {"replica": 2, "data": 2, "tensor": 2, "zero": 1},
    "by hand": {"pipe": 2, "chunks": 2, "per_chunk": (3, 0, 1, 3), "data": 4, "zero": 1},
}


class Setup:
    """A layout's mesh, and how the training state of SPECS looks in it."""

    def __init__(self, pipe=1, chunks=1, placement="loop", per_chunk=(), zero=0, optimizer="muon", layers=LAYERS, **mesh):
        self.mesh = make_mesh({"pipe": pipe, **mesh})
        layout = sharding.make_layout(layers, placement, pipe, chunks, per_chunk)
        sizes = dict(self.mesh.shape)
        is_spec = lambda x: isinstance(x, ParamSpec)
        over = lambda f: jax.tree.map(f, SPECS, is_leaf=is_spec)
        config = types.SimpleNamespace(name=optimizer, weight_decay=0.1, b1=0.9, b2=0.95, eps=1e-8, momentum=0.9)
        transform = make_optimizer(config, SPECS)

        def shard(s, zero):
            parts = sharding.partition(s, sizes)
            return NamedSharding(self.mesh, sharding.with_axis(parts, sharding.zero_dim(s, layout, sizes, zero), "data"))

        params = over(lambda s: jax.ShapeDtypeStruct(sharding.memory_shape(s, layout, sizes), jnp.float32))
        optimizer = jax.eval_shape(transform.init, params)
        alone = NamedSharding(self.mesh, PartitionSpec())
        self.stored = {
            "step": Stored(()),
            "params": over(lambda s: sharding.stored(s, layout)),
            "optimizer": like_params(
                transform, optimizer, over(lambda s: sharding.stored(s, layout)), lambda leaf: Stored(leaf.shape)
            ),
        }
        shardings = {
            "step": alone,
            "params": over(lambda s: shard(s, 0)),
            "optimizer": like_params(transform, optimizer, over(lambda s: shard(s, zero)), alone),
        }
        shapes = {"step": jax.ShapeDtypeStruct((), jnp.int32), "params": params, "optimizer": optimizer}
        self.abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    def expected(self, seed=0):
        """The state as numpy arrays in this layout's memory form; the canonical values depend on the seed only."""
        found, leaves, forms, tree = llm.checkpoint._flatten(self.abstract, self.stored)
        return tree.unflatten(map(self._in_memory, found, leaves, forms, [seed] * len(found)))

    def _in_memory(self, name, leaf, form, seed):
        value, out = canonical(name, form.shape, leaf.dtype, seed), np.zeros(leaf.shape, leaf.dtype)
        if form.index_CPL is None:
            out[tuple(slice(0, n) for n in form.shape)] = value
        else:
            out[form.index_CPL >= 0] = value[form.index_CPL[form.index_CPL >= 0]]
        return out

    def state(self, seed=0):
        return jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), self.expected(seed), self.abstract)


def canonical(name, shape, dtype, seed):
    bits = np.random.default_rng([seed, *name.encode()]).integers(1, 1000, shape)
    return np.asarray(bits, np.int32) if np.issubdtype(dtype, np.integer) else np.asarray(1 / bits, np.float32)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def save(folder, setup, *steps, keep=9):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, setup.state(step), setup.stored, {"step": step})
    checkpoints.close()


@pytest.fixture(scope="module")
def setups():
    return {name: Setup(**layout) for name, layout in LAYOUTS.items()}


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


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_checkpoint as t
import llm.checkpoint as c
setup = t.Setup(pipe=2, chunks=2)
t.save({folder!r}, setup, 10)
whole = c.write_shards
def once(folder, name, *args):
    if name == "params/embedding":
        os.kill(os.getpid(), signal.SIGKILL)
    whole(folder, name, *args)
c.write_shards = once
t.save({folder!r}, setup, 20)
"""


@pytest.mark.smoke
def test_killed_while_saving(setups, tmp_path, caplog):
    code = textwrap.dedent(KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run")))
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, timeout=120, text=True)
    assert result.returncode == -9, result.stderr
    assert [path.name for path in (tmp_path / "run").glob("20*")] == ["20.orbax-checkpoint-tmp"]
    checkpoints, setup = Checkpoints(tmp_path / "run", 3), setups["pipe4"]
    assert checkpoints.latest() == 10 and "20.orbax-checkpoint-tmp is unfinished" in caplog.text
    assert_equal(checkpoints.restore(10, setup.abstract, setup.stored), setup.expected(10))
    for step in (20, 30):
        checkpoints.save(step, setup.state(step), setup.stored, {})
    checkpoints.close()
    assert Checkpoints(tmp_path / "run", 3).steps() == [10, 20, 30]
    assert_equal(checkpoints.restore(20, setup.abstract, setup.stored), setup.expected(20))
    assert not list((tmp_path / "run").glob("*tmp"))


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "no manifest"])
def test_an_incomplete_step_is_passed_over(damage, setups, tmp_path, caplog):
    """A folder that lacks files is not resumed from, is named in a warning and makes room for the next save of it."""
    setup = setups["pipe2 v2"]
    save(tmp_path, setup, 10, 20)
    state = tmp_path / "20" / "state"
    file = state / ("manifest.json" if "manifest" in damage else "params/block/query/c/3/0/0/0")
    if damage in ("cut", "manifest"):
        file.write_bytes(file.read_bytes()[:-9])
    else:
        file.unlink()
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.latest() == 10
    assert "step 20" in caplog.text and ("manifest" if "manifest" in damage else "params/block/query") in caplog.text
    with pytest.raises(CheckError, match=r"step 20 .*"):
        checkpoints.restore(20, setup.abstract, setup.stored)
    damaged = sorted(path.relative_to(tmp_path / "20") for path in (tmp_path / "20").rglob("*"))
    for step in (20, 30):
        checkpoints.save(step, setup.state(step), setup.stored, {})
    checkpoints.close()
    assert Checkpoints(tmp_path, 2).steps() == [20, 30]
    assert_equal(checkpoints.restore(20, setup.abstract, setup.stored), setup.expected(20))
    aside = tmp_path / "20.damaged"
    assert sorted(path.relative_to(aside) for path in aside.rglob("*")) == damaged


def test_what_is_not_damaged_is_left_alone(setups, tmp_path, monkeypatch):
    """A step of a newer version, or one that the system cannot read at the moment; and names that are no steps."""
    setup = setups["one"]
    save(tmp_path, setup, 10)
    monkeypatch.setattr("llm.arrays.FORMAT", 2)
    save(tmp_path, setup, 20)
    monkeypatch.undo()
    (tmp_path / "30").write_text("not a folder")
    for name in ("007", "٣", "40.damaged"):
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path, 1)
    assert checkpoints.steps() == [10]
    with pytest.raises(UserError, match=r"step 20 .* has format 2, this version reads up to 1.*nothing was changed"):
        checkpoints.latest()
    with pytest.raises(OSError, match="step 20"):
        checkpoints.save(20, setup.state(), setup.stored, {})
    save(tmp_path, setup, 40, keep=1)
    assert (tmp_path / "20/state/manifest.json").is_file() and (tmp_path / "30").is_file()
    monkeypatch.setattr("llm.arrays.Path.read_text", lambda path, **_: raise_(PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match="Permission denied"):
        Checkpoints(tmp_path, 1).latest()


def raise_(error):
    raise error


def test_the_one_before_a_damaged_one_is_taken(setups, tmp_path, caplog):
    """A flipped bit is found while reading; the next save sets the step aside, also under a name that is taken."""
    setup = setups["pipe2 v2"]
    save(tmp_path, setup, 10, 20, 30)
    for step in (20, 30):
        flip(tmp_path / str(step) / "state/params/block/query/c/3/0/0/0")
    (tmp_path / "30.damaged").mkdir()
    checkpoints = Checkpoints(tmp_path, 9)
    assert checkpoints.latest() == 30
    step, state = checkpoints.newest(lambda step: checkpoints.restore(step, setup.abstract, setup.stored))
    assert step == 10 and "step 30 is left out" in caplog.text and "step 20 is left out" in caplog.text
    assert_equal(state, setup.expected(10))
    checkpoints.save(20, setup.state(20), setup.stored, {})
    checkpoints.close()
    assert Checkpoints(tmp_path, 9).steps() == [10, 20]
    assert {path.name for path in tmp_path.iterdir()} == {"10", "20", "20.damaged", "30.damaged", "30.damaged2"}


def test_nothing_readable_is_refused_and_left_alone(setups, tmp_path):
    save(tmp_path, setups["one"], 10, 20)
    (tmp_path / "10/state/manifest.json").unlink()
    flip(tmp_path / "20/state/step/c")
    before = sorted(tmp_path.rglob("*"))
    read = lambda step: Checkpoints(tmp_path, 1).restore(step, setups["one"].abstract, setups["one"].stored)
    with pytest.raises(CheckError, match=r"no checkpoint .* can be read; nothing was changed"):
        Checkpoints(tmp_path, 1).newest(read)
    assert sorted(tmp_path.rglob("*")) == before


def flip(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["c/3/0/0/0", "zarr.json"])
def test_a_flipped_bit_is_found(file, setups, tmp_path):
    setup = setups["pipe2 v2"]
    save(tmp_path, setup, 20)
    path = tmp_path / "20" / "state" / "params/block/query" / file
    content = bytearray(path.read_bytes())
    content[content.index(b"7") if file == "zarr.json" else 40] ^= 1  # 7 layers become 6
    path.write_bytes(content)
    for act in (
        lambda: Checkpoints(tmp_path, 1).restore(20, setup.abstract, setup.stored),
        lambda: read(tmp_path, 20, "params/block/query", 3),
    ):
        with pytest.raises(CheckError, match=r"step 20 .*params/block/query is damaged"):
            act()
    if file != "zarr.json":
        read(tmp_path, 20, "params/block/query", 2)  # the other layers are whole


def until_it_fails(checkpoints):
    for _ in range(1000):  # it does not wait for what goes on in the background
        checkpoints.check()
        time.sleep(0.01)


@pytest.mark.parametrize("when", ["save", "wait", "close", "check"])
def test_a_failed_save_surfaces(when, setups, tmp_path, monkeypatch):
    setup = setups["pipe2 v2"]
    save(tmp_path, setup, 10)
    checkpoints = Checkpoints(tmp_path, 1)

    def fail(folder, name, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(llm.checkpoint, "write_shards", fail)
    checkpoints.save(20, setup.state(), setup.stored, {})
    act = {"save": lambda: checkpoints.save(30, setup.state(), setup.stored, {}), "check": lambda: until_it_fails(checkpoints)}
    with pytest.raises(OSError, match=r"step 20 .*No space left"):
        act.get(when, getattr(checkpoints, when))()
    monkeypatch.undo()
    assert checkpoints.steps() == [10]
    checkpoints.wait()
    for step in (20, 30):
        checkpoints.save(step, setup.state(step), setup.stored, {})
    checkpoints.close()
    assert checkpoints.steps() == [30]
    assert_equal(checkpoints.restore(30, setup.abstract, setup.stored), setup.expected(30))


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
