"""What has gone wrong in attention kernels elsewhere, and must be right here, or refused, in every back end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.attention import KERNELS, MaskSpec, attention, kernel, run_kernel
from llm.kernels.options import Options
from parallel import hlo
from parallel.split import split

T, H, G, K, BLOCK = 40, 4, 2, 16, 16
IDS = jnp.asarray([[0] * 13 + [1] * 20 + [-1] * 7], jnp.int32)
MASKS = dict(
    causal=MaskSpec(),
    left_window=MaskSpec(False, (5, 0)),  # not causal by name: the future must be hidden all the same
    window=MaskSpec(True, (5, 0)),
    packed=MaskSpec(False, None, IDS, IDS),
    offset=MaskSpec(True, None, q_offset=3, kv_offset=9),
)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


ARGS = draw(0, 1, T, H, K), draw(1, 1, T, G, K), draw(2, 1, T, G, K)


def attend(backend, mask, q, k, v, softcap=None):
    options = Options(K**-0.5, softcap, backend, block=BLOCK)
    return run_kernel(options, q, k, v, None, kernel(backend).prepare(mask, q.shape[1], k.shape[1], options))


@functools.cache
def compiled(backend, mask, softcap=None):
    def run(q, k, v, do):
        o, pull = jax.vjp(lambda *a: attend(backend, MASKS[mask], *a, softcap)[0], q, k, v)
        return o, pull(do)

    return jax.jit(run)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", KERNELS)
def test_what_is_hidden_does_not_leak(backend, mask):
    """Huge keys and values that one query must not see change nothing of it, not even a bit, and get no gradient from it.
    With a soft-cap, which would show them if it came after the mask."""
    q, k, v = ARGS
    run, seen = compiled(backend, mask, 5.0), np.asarray(MASKS[mask].visible(T, T))[0]
    for i in (0, 12, 25, T - 1):
        hidden = ~seen[i][None, :, None, None]
        only_i = jnp.zeros(q.shape).at[:, i].set(1)
        o, (dq, dk, dv) = run(q, k, v, only_i)
        changed, _ = run(q, jnp.where(hidden, 50.0, k), jnp.where(hidden, 1e4, v), only_i)
        np.testing.assert_array_equal(changed[:, i], o[:, i])
        for d in (dk, dv):
            assert not np.any(np.where(hidden, d, 0))
        assert np.any(dv) == seen[i].any()
        assert np.any(dk) or seen[i].sum() < 2  # the softmax of a single key is 1, whatever the key
        if not seen[i].any():
            assert not np.any(o[:, i])
            assert not np.any(dq)


@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_repeat_bit_by_bit(backend):
    first, again = (compiled(backend, "packed", 5.0)(*ARGS, ARGS[0]) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.parametrize("backend", KERNELS)
def test_a_mapped_call_is_one_of_a_larger_batch(backend):
    q, k, v = (jnp.concatenate([a, a[:, ::-1]]) for a in ARGS)
    run = functools.partial(attend, backend, MASKS["window"])
    got = jax.jit(jax.vmap(lambda *a: jax.tree.map(lambda o: o[0], run(*(x[None] for x in a)))))(q, k, v)
    for a, b in zip(got, run(q, k, v)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", KERNELS)
def test_very_low_log_sum_exps_make_no_nan(backend):
    """All scores of a row far below what exp can hold."""
    q, k, v = ARGS
    o, gradients = compiled(backend, "packed")(-40 * jnp.abs(q), 40 * jnp.abs(k), v, q)
    assert all(np.isfinite(a).all() for a in (o, *gradients))


@pytest.mark.parametrize("backend", KERNELS)
def test_the_backward_does_not_run_the_forward_again(backend):
    """Remat that keeps what is named "attention" keeps the residuals of the kernel."""
    q = ARGS[0]

    def layer(w, ctx, state, x):
        o = attention(x * w, x[:, :, :G], x[:, :, G:], MASKS["packed"], backend=backend)
        return x + jnp.sin(o), state, {}

    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("attention"))
    programs = split(kept, jnp.ones(()), (), {}, q, {})
    stash = sorted(a.shape for a in programs.a + programs.aw)
    assert stash == sorted([q.shape, q.shape, (1, H, T)]), "more or less than the layer's input, output and log-sum-exp"
    if backend == "chunked":
        assert programs.matmuls == (2, 5, 0)
    else:
        backward = jax.make_jaxpr(programs.backward)(
            jnp.ones(()), (), {}, *(jax.tree.map(jnp.zeros_like, s) for s in (programs.a, programs.aw)), q
        )
        calls = [e.params["name"] for e, _ in hlo.equations(backward) if e.primitive.name == "pallas_call"]
        assert sorted(calls) == ["attention_dkv", "attention_dq"]
