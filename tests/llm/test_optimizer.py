"""Optimiser: schedules, decay mask, Muon by layer, fp32 state, help for shardings."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest

from llm.optimizer import learning_rate, like_params, make_optimizer
from parallel.errors import UserError
from parallel.mesh import make_mesh
from parallel.sharding import Layout, ParamSpec, partition, with_axis, zero_dim

CPL = (2, 1, 2)  # chunks, pipe, slots; the last slot of the last chunk is empty


def make_config(**changes):
    fields = {"name": "adamw", "weight_decay": 0.0, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "momentum": 0.95}
    schedule = {"lr": 0.1, "warmup": 4, "decay": "cosine", "final": 0.1, "stable": 0.5}
    return types.SimpleNamespace(**{**fields, **schedule, **changes})


def spec(shape, kind, inputs=(), stacked=True):
    return ParamSpec(shape, (None,) * len(shape), lambda key, shape: None, kind, inputs, stacked)


SPECS = {
    "block": {
        "query": spec((6, 2, 4), "matrix", (0,)),
        "out": spec((2, 4, 6), "matrix", (0, 1)),
        "bias": spec((2, 4), "vector"),
        "norm": spec((6,), "vector"),
    },
    "embedding": spec((11, 6), "embedding", stacked=False),
    "head": spec((6, 11), "matrix", (0,), stacked=False),
}


def random_tree(seed, dtype=jnp.float32):
    """A tree of SPECS in memory form, the empty slot zero."""

    random = np.random.default_rng(seed)

    def draw(s):
        x = random.standard_normal((*CPL, *s.shape) if s.stacked else s.shape)
        if s.stacked:
            x[-1, :, -1] = 0
        return jnp.asarray(x, dtype)

    return jax.tree.map(draw, SPECS)


def first_update(config, gradients=None, params=None):
    optimizer = make_optimizer(config, SPECS)
    params = random_tree(0) if params is None else params
    gradients = random_tree(1) if gradients is None else gradients
    return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)


@pytest.mark.parametrize("decay", ["cosine", "wsd", "constant"])
def test_schedule_ends(decay):
    rate = learning_rate(make_config(decay=decay), 20)
    rates = np.array([rate(step) for step in range(25)])
    np.testing.assert_allclose(rates[:4], [0.025, 0.05, 0.075, 0.1], rtol=1e-6)
    assert rates[3] == np.float32(0.1) == rates.max()
    assert np.all(np.diff(rates[3:]) <= 0)
    np.testing.assert_allclose(rates[19:], 0.1 if decay == "constant" else 0.01, rtol=1e-6)
    if decay == "wsd":  # t = 10 is the last at the peak, t = 15 is half way down
        assert rates[9] == np.float32(0.1) > rates[10]
        np.testing.assert_allclose(rates[14], 0.01 + 0.09 * (1 - 0.5**0.5), rtol=1e-6)
    if decay == "cosine":
        np.testing.assert_allclose(rates[11], 0.055, rtol=1e-6)


@pytest.mark.parametrize("decay", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup, steps", [(0, 1), (0, 5), (1, 1), (8, 8), (9, 4)])
def test_schedule_corners(decay, warmup, steps):
    rate = learning_rate(make_config(decay=decay, warmup=warmup), steps)
    rates = np.array([rate(step) for step in range(steps)])
    assert np.all(np.isfinite(rates)) and np.all(rates > 0) and np.all(rates <= np.float32(0.1))
    assert warmup > 1 or rates[0] == np.float32(0.1)


def test_first_sgd_update_learns():
    """Warm-up 4, gradient 1: the changes are the rates 1/4, 2/4, ..., and the rate is a function of the step alone."""
    config = make_config(name="sgd", momentum=0.0, lr=1.0, final=0.0)
    optimizer, rate = make_optimizer(config, SPECS), learning_rate(config, 10)
    params = random_tree(0)
    state, ones, changes = optimizer.init(params), jax.tree.map(jnp.ones_like, params), []
    update = jax.jit(optimizer.update)
    for step in range(10):
        updates, state = update(ones, state, params)
        changes.append(float(rate(step) * updates["embedding"][0, 0]))
    np.testing.assert_allclose(changes[:4], [0.25, 0.5, 0.75, 1])
    assert changes[-2] > changes[-1] == 0


def test_momentum():
    updates, state = first_update(make_config(name="sgd", momentum=0.5))
    optimizer = make_optimizer(make_config(name="sgd", momentum=0.5), SPECS)
    updates, _ = optimizer.update(random_tree(1), state, random_tree(0))
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, 1.5 * g, rtol=1e-6), updates, random_tree(1))


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_decay_is_decoupled_and_on_matrices_only(name):
    plain, _ = first_update(make_config(name=name))
    decayed, _ = first_update(make_config(name=name, weight_decay=0.5))
    params, block = random_tree(0), lambda tree: tree["block"]
    for key in ("query", "out"):
        np.testing.assert_allclose(block(decayed)[key] - block(plain)[key], 0.5 * block(params)[key], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(decayed["head"] - plain["head"], 0.5 * params["head"], rtol=1e-5, atol=1e-6)
    for a, b in [(block(decayed)[k], block(plain)[k]) for k in ("bias", "norm")] + [(decayed["embedding"], plain["embedding"])]:
        np.testing.assert_array_equal(a, b)


@pytest.mark.smoke
def test_muon_is_optax_muon_of_each_layer():
    """The update of a layer inside a stacked leaf is that of the layer alone, reshaped to a matrix by hand."""
    updates, _ = first_update(make_config(name="muon"))
    gradients = random_tree(1)
    alone = optax.contrib.muon(1.0, consistent_rms=0.2)
    for key, fan_in in (("query", 6), ("out", 8)):
        for c, slot in np.ndindex(CPL[0], CPL[2]):
            g = gradients["block"][key][c, 0, slot].reshape(fan_in, -1)
            want, _ = alone.update(g, alone.init(g), g)
            got = updates["block"][key][c, 0, slot].reshape(fan_in, -1)
            np.testing.assert_allclose(got, -want, atol=1e-5)
    adam, _ = first_update(make_config(name="adamw"))
    for a, b in ((updates["block"]["bias"], adam["block"]["bias"]), (updates["embedding"], adam["embedding"])):
        np.testing.assert_array_equal(a, b)
    rms = [float(jnp.sqrt(jnp.mean(u[0] ** 2))) for u in (updates["block"]["query"], updates["block"]["out"])]
    assert all(0.1 < r < 0.3 for r in rms)


@pytest.mark.parametrize(
    "mesh", [dict(data=2), dict(data=3), dict(data=4), dict(data=3, tensor=2), dict(data=4, tensor=2)], ids=str
)
def test_muon_of_parts_is_part_of_muon(mesh):
    """With ZeRO and tensor parallelism: `data` divides chunks and slots (2), or dimensions of a matrix (3, 4)."""
    mesh = make_mesh(mesh)
    specs = jax.tree.map(lambda s: s, SPECS)
    specs["block"]["query"] = dataclasses.replace(specs["block"]["query"], axes=(None, "heads", None))
    specs["block"]["out"] = dataclasses.replace(specs["block"]["out"], axes=("heads", None, None))
    layout = Layout(3, np.array([[[0, 1]], [[2, -1]]]))
    zero = lambda s: with_axis(partition(s, mesh.shape), zero_dim(s, layout, mesh.shape, 1), "data")
    config, partitions = make_config(name="muon", weight_decay=0.1), jax.tree.map(zero, specs)
    whole, parts = make_optimizer(config, specs), make_optimizer(config, specs, partitions)
    params, state = random_tree(0), whole.init(random_tree(0))
    moments = like_params(whole, state, partitions, jax.sharding.PartitionSpec())
    shard = dict(mesh=mesh, in_specs=(partitions, moments, partitions), out_specs=(partitions, moments), check_vma=False)
    want, got = (None, state), (None, state)
    for seed in (1, 2):
        want = jax.jit(whole.update)(random_tree(seed), want[1], params)
        got = jax.jit(jax.shard_map(parts.update, **shard))(random_tree(seed), got[1], params)
    assert any("data" in p for p in jax.tree.leaves(partitions))
    jax.tree.map(lambda w, g: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), want, got)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_empty_slots_stay_zero(name):
    params, gradients = random_tree(0), random_tree(1)
    optimizer = make_optimizer(make_config(name=name, weight_decay=0.1), SPECS)
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = jax.jit(optimizer.update)(gradients, state, params)
        params = jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)
    for leaf in jax.tree.leaves(params["block"]):
        assert not np.any(leaf[-1, :, -1])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((params, state)))


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_state_is_fp32(name):
    config = make_config(name=name)
    updates, state = first_update(config, random_tree(1, jnp.bfloat16), random_tree(0, jnp.bfloat16))
    floats = [x for x in jax.tree.leaves((updates, state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_like_params(name):
    """Shapes named by the parameter's path come back at its moments; counters get the other value."""
    optimizer = make_optimizer(make_config(name=name), SPECS)
    state = jax.eval_shape(optimizer.init, random_tree(0))
    shapes = jax.tree.map(lambda x: types.SimpleNamespace(shape=x.shape), random_tree(0))
    entries = like_params(optimizer, state, shapes, lambda leaf: types.SimpleNamespace(shape=leaf.shape))
    assert jax.tree.structure(entries) == jax.tree.structure(state)
    jax.tree.map(lambda entry, leaf: np.testing.assert_equal(entry.shape, leaf.shape), entries, state)
    others = jax.tree.leaves(like_params(optimizer, state, jax.tree.map(lambda x: "moment", shapes), "other"))
    assert others.count("other") == {"adamw": 1, "muon": 3, "sgd": 0}[name]
    assert others.count("moment") == {"adamw": 12, "muon": 3 + 2 * 3, "sgd": 6}[name]


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="adamw, muon, sgd"):
        make_optimizer(make_config(name="lion"), SPECS)
    with pytest.raises(UserError, match="cosine"):
        learning_rate(make_config(decay="linear"), 10)
