"""Cutting a layer into F, B and W: the facts of JAX that it rests on, exactness, and what is (not) stashed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from parallel.split import count_matmuls, flat_jaxpr, split

B, S, D, F = 2, 3, 4, 6
REMATS = dict(none=None, names=("kernel", "up"), full=())


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# ----------------------------------------------------------------------------------------------- layers to cut
def mlp(w, ctx, state, x):
    """The least: two matmuls, a bias, a residual branch; no context, state or sums."""
    return x + jnp.sin(checkpoint_name(x @ w["up"] + w["bias"], "up")) @ w["down"], state, {}


@jax.custom_vjp
def kernel(q, k):
    return _kernel(q, k)[0]


def _kernel(q, k):
    scores = q @ k.T
    top = jax.nn.logsumexp(scores, -1, keepdims=True)
    return jnp.exp(scores - top) @ k, top


def _kernel_forward(q, k):
    o, lse = _kernel(q, k)
    o, lse = checkpoint_name(o, "kernel"), checkpoint_name(lse, "kernel")
    return o, (q, k, o, lse)


def _kernel_backward(residuals, do):
    q, k, o, lse = residuals
    p = jnp.exp(q @ k.T - lse)
    ds = p * (do @ k.T - (do * o).sum(-1, keepdims=True))
    return ds @ k, ds.T @ q + p.T @ do


kernel.defvjp(_kernel_forward, _kernel_backward)


def with_kernel(w, ctx, state, x):
    """A kernel with its own backward rule and named residuals, inside a jitted function."""
    run = jax.jit(lambda q, k: jax.vmap(kernel)(q, k))
    return x + run(x @ w["query"], x @ w["key"]) @ w["out"], state, {}


def with_all(w, ctx, state, carry):
    """bf16, dropout from a key, microbatch data, a carry of two arrays, sums, and state that F reads and writes."""
    index, side = ctx
    x, extra = carry["x"], carry["extra"]
    h = (x * state["gain"]).astype(jnp.bfloat16)
    up = checkpoint_name(h @ w["up"].astype(jnp.bfloat16), "up")
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.wrap_key_data(side["key"]), index), 0.5, up.shape)
    down = jnp.where(keep, jax.nn.gelu(up) * 2, 0) @ w["down"].astype(jnp.bfloat16)
    y = x + side["scale"][:, None, None] * down.astype(jnp.float32) + extra[:, None, None]
    sums = dict(balance=jnp.square(up.astype(jnp.float32)).mean(), decay=(w["bias"] * w["bias"]).sum())
    state = dict(gain=state["gain"] + jnp.abs(x).mean(), calls=state["calls"] + 1)
    return dict(x=y, extra=extra * w["bias"].mean() + x.sum((1, 2))), state, sums


WEIGHTS = dict(up=normal(0, D, F), down=normal(1, F, D), bias=normal(2, F))
WEIGHTS |= dict(query=normal(3, D, D), key=normal(4, D, D), out=normal(5, D, D))
KEY = jax.random.key_data(jax.random.key(7))
X, DY = normal(8, B, S, D), normal(9, B, S, D)
ALL = dict(
    w={n: WEIGHTS[n] for n in ("up", "down", "bias")},
    ctx=(jnp.int32(3), dict(key=KEY, scale=normal(6, B))),
    state=dict(gain=jnp.float32(0.7), calls=jnp.int32(5)),
    x=dict(x=X, extra=normal(10, B)),
    seeds=dict(balance=jnp.float32(0.3), decay=jnp.float32(-2.0)),
)
LAYERS = dict(
    mlp=(mlp, dict(w={n: WEIGHTS[n] for n in ("up", "down", "bias")}, ctx=(), state={}, x=X, seeds={}), DY),
    with_kernel=(
        with_kernel,
        dict(w={n: WEIGHTS[n] for n in ("query", "key", "out")}, ctx=(), state={}, x=X, seeds={}),
        DY,
    ),
    with_all=(with_all, ALL, dict(x=DY, extra=normal(11, B))),
)


def remat(layer, mode):
    keep = REMATS[mode]
    policy = jax.checkpoint_policies.save_only_these_names(*(keep or ()))
    return layer if keep is None else jax.checkpoint(layer, policy=policy)


def cut(name, mode="none", fused=False):
    layer, given, _ = LAYERS[name]
    return split(remat(layer, mode), given["w"], given["ctx"], given["state"], given["x"], given["seeds"], fused)


@functools.cache
def wanted(name):
    """Of the plain layer: output, new state, sums, gradient of the carry and of the parameters, by jax.vjp; evaluated
    equation by equation like the programs, since XLA rounds differently when it compiles several together."""
    layer, given, dy = LAYERS[name]

    def run(w, ctx, state, x, seeds, dy):
        def differentiated(w, x):
            y, new, sums = layer(w, ctx, state, x)
            return (y, sums), new

        (y, sums), pull, new = jax.vjp(differentiated, w, x, has_aux=True)
        dw, dx = pull((dy, seeds))
        return y, new, sums, dx, dw

    args = (*(given[n] for n in ("w", "ctx", "state", "x", "seeds")), dy)
    flat, out = flat_jaxpr(run, *args)
    return jax.tree.unflatten(jax.tree.structure(out), core.jaxpr_as_fun(flat)(*jax.tree.leaves(args)))


def assert_same(want, got):
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


# ----------------------------------------------------------------------------------------------- two facts about JAX
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", REMATS)
def test_fact_the_leaves_of_a_vjp_are_its_residuals_in_an_order_that_depends_on_the_function_alone(name, mode):
    layer, given, dy = LAYERS[name]
    layer = remat(layer, mode)
    w, ctx = given["w"], given["ctx"]

    def pull(state, x):
        return jax.vjp(lambda w, x: (lambda y, new, sums: (y, sums))(*layer(w, ctx, state, x)), w, x)[1]

    def again(leaves, dy):
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (given["state"], given["x"]))
        own, tree = jax.tree.flatten(pull(*zeros))
        assert [(a.shape, a.dtype) for a in own] == [(a.shape, a.dtype) for a in leaves]
        return jax.tree.unflatten(tree, leaves)((dy, given["seeds"]))

    leaves = jax.jit(lambda *args: jax.tree.leaves(pull(*args)))(given["state"], given["x"])
    dw, dx = jax.jit(again)(leaves, dy)
    for want, got in zip(jax.tree.leaves(wanted(name)[3:]), jax.tree.leaves((dx, dw))):
        np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-5)


def test_fact_equations_can_be_bound_again():
    """Every kind of equation, also those with a jaxpr inside, evaluated one by one from the outside."""

    def function(w, x):
        h = jax.jit(lambda x: x @ w)(x)
        h = jax.lax.scan(lambda c, a: (c * a, c + a), h[0], h)[1]
        h = jax.lax.cond(h.sum() > 0, lambda: h, lambda: -h)
        return jax.vmap(kernel)(h, jax.nn.relu(h)), jax.random.normal(jax.random.key(1), h.shape)

    w, x = WEIGHTS["query"], X
    flat, out = flat_jaxpr(function, w, x)
    assert not {e.primitive.name for e in flat.jaxpr.eqns} & {"jit", "pjit", "custom_vjp_call"}
    got = core.jaxpr_as_fun(flat)(w, x)
    assert_same(function(w, x), tuple(got))
    assert [a.shape for a in jax.tree.leaves(out)] == [a.shape for a in got]


# ----------------------------------------------------------------------------------------------- exactness
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", REMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_programs_give_what_vjp_gives_to_the_last_bit(name, mode, fused):
    _, given, dy = LAYERS[name]
    w, ctx, seeds = given["w"], given["ctx"], given["seeds"]
    programs = cut(name, mode, fused)
    y, state, sums, a, aw = programs.forward(w, ctx, given["state"], given["x"])
    shapes = lambda arrays: [(a.shape, a.dtype) for a in arrays]
    assert shapes(a) == shapes(programs.a)
    assert shapes(aw) == shapes(programs.aw)
    if fused:
        assert programs.weights is None
        assert not programs.aw
        assert not programs.cut
        dx, dw = programs.backward(w, ctx, seeds, a, aw, dy)
    else:
        dx, handed = programs.backward(w, ctx, seeds, a, aw, dy)
        assert shapes(handed) == shapes(programs.cut)
        dw = programs.weights(w, ctx, seeds, aw, handed)
    assert_same(wanted(name), (y, state, sums, dx, dw))


# ----------------------------------------------------------------------------------------------- what is stashed
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", REMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_only_what_depends_on_the_input_or_the_state_is_stashed(name, mode, fused):
    """Every entry of the stash changes with the input and the state: parameters and context alone give none of them."""
    _, given, _ = LAYERS[name]
    programs = cut(name, mode, fused)
    run = lambda scale: jax.tree.leaves(
        programs.forward(
            given["w"],
            given["ctx"],
            jax.tree.map(lambda a: (a * scale).astype(a.dtype), given["state"]),
            jax.tree.map(lambda a: a * scale, given["x"]),
        )[3:]
    )
    for one, other in zip(run(1), run(-3)):
        assert np.any(np.asarray(one, np.float32) != np.asarray(other, np.float32)), "this can be computed again"
    sizes = {np.shape(a) for a in jax.tree.leaves(given["w"])}
    assert not sizes & {a.shape for a in (*programs.a, *programs.aw, *programs.cut)}, "a parameter is stashed"


def test_masks_and_casts_are_not_stashed():
    programs = cut("with_all")
    assert not [a for a in (*programs.a, *programs.aw) if a.dtype == bool]
    text = str(jax.make_jaxpr(programs.backward)(ALL["w"], ALL["ctx"], ALL["seeds"], programs.a, programs.aw, ALL["x"]))
    assert "random_bits" in text or "threefry" in text  # the mask is drawn again


def test_a_residual_that_only_the_input_gradient_reads_does_not_wait_for_w():
    programs = cut("mlp")
    assert [a.shape for a in programs.a] == [(B, S, F)]  # cos
    assert sorted(a.shape for a in programs.aw) == [(B, S, D), (B, S, F)]  # the input and sin
    assert sorted(a.shape for a in programs.cut) == [(B, S, D), (B, S, F)]  # the gradients of both matmuls' outputs


def test_under_full_remat_the_stash_is_the_input_and_the_state():
    assert [a.shape for a in cut("mlp", "full", fused=True).a] == [X.shape]
    shapes = sorted(a.shape for a in cut("with_all", "full", fused=True).a)
    assert shapes == [(), (B,), X.shape]  # gain, extra, x; the counter is not differentiated through


def test_state_in_the_backward_is_that_of_its_own_forward():
    """Between F and B of a microbatch the state has moved on; no program but F takes it."""
    _, given, dy = LAYERS["with_all"]
    w, ctx, seeds = given["w"], given["ctx"], given["seeds"]
    programs = cut("with_all", "full")
    first = programs.forward(w, ctx, given["state"], given["x"])
    second = programs.forward(w, ctx, first[1], given["x"])
    assert float(second[1]["calls"]) == float(given["state"]["calls"]) + 2
    dx, handed = programs.backward(w, ctx, seeds, *first[3:], dy)
    other, _ = programs.backward(w, ctx, seeds, *second[3:], dy)
    assert_same(wanted("with_all")[3:], (dx, programs.weights(w, ctx, seeds, first[4], handed)))
    assert np.any(other["x"] != dx["x"])


# ----------------------------------------------------------------------------------------------- cost
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", REMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_together_they_have_the_matmuls_of_a_plain_vjp(name, mode, fused):
    layer, given, dy = LAYERS[name]
    layer = remat(layer, mode)

    def plain(w, x, dy):
        primal = lambda w, x: (lambda y, new, sums: (y, sums))(*layer(w, given["ctx"], given["state"], x))
        out, pull = jax.vjp(primal, w, x)
        return out, pull((dy, given["seeds"]))

    assert sum(cut(name, mode, fused).matmuls) == count_matmuls(plain, given["w"], given["x"], dy)


def test_matmuls_of_each_program():
    assert cut("mlp").matmuls == (2, 2, 2)
    assert cut("mlp", "names").matmuls == (2, 2, 2)  # the output of `up` is kept
    assert cut("mlp", "full").matmuls == (2, 3, 2)
    assert cut("mlp", "full", fused=True).matmuls == (2, 5, 0)
    # query, key, scores, values, out; the kernel's backward has five of its own and B three input gradients
    assert cut("with_kernel").matmuls == (5, 8, 3)
    # q and k are computed again, the kernel's forward is not
    assert cut("with_kernel", "names").matmuls == (5, 10, 3)
    assert cut("with_kernel", "full").matmuls[1] > 10
