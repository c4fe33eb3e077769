"""Attention: what is visible, the mathematics against float64, rows without a visible key, grouped heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.attention import MaskSpec, attention
from llm.kernels.backends import TABLE
from parallel.errors import UserError

B, T, S, H, G, K, DV = 2, 5, 7, 4, 2, 6, 3
CAUSAL = MaskSpec()
FULL = MaskSpec(causal=False)
ON_CPU = [name for name, row in TABLE.items() if "cpu" in row.platforms]
attend = jax.jit(attention, static_argnames=("scale", "softcap", "return_lse", "backend"))


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q, KEYS, VALUES = draw(0, B, T, H, K), draw(1, B, S, G, K), draw(2, B, S, G, DV)
Q_SEGMENTS = np.array([[0, 0, 1, 1, 2], [0, 0, 0, -1, -1]], np.int32)
KV_SEGMENTS = np.array([[0, 0, 0, 1, 1, 2, -1], [0, 0, 0, 0, 3, 3, -1]], np.int32)


def visible(q, k, causal=True, window=None, q_offset=0, kv_offset=0, segments=None):
    """One query and key, in words."""
    i, j = q + q_offset, k + kv_offset
    if causal and j > i:
        return False
    if window and not i - window[0] <= j <= i + window[1]:
        return False
    return segments is None or (segments[0][q] == segments[1][k] and segments[0][q] >= 0)


MASKS = dict(
    causal={},
    full=dict(causal=False),
    window=dict(window=(2, 0)),
    both_sides=dict(causal=False, window=(1, 2)),
    later_queries=dict(q_offset=2),
    later_keys=dict(kv_offset=3),
    far_window=dict(causal=False, window=(2, 1), q_offset=9, kv_offset=4),
)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_what_all_its_conditions_allow(name, segments):
    how = MASKS[name]
    ids = dict(q_segment_ids=jnp.asarray(Q_SEGMENTS), kv_segment_ids=jnp.asarray(KV_SEGMENTS)) if segments else {}
    got = np.broadcast_to(MaskSpec(**how, **ids).visible(T, S), (B, T, S))
    pair = lambda b: (Q_SEGMENTS[b], KV_SEGMENTS[b]) if segments else None
    want = [[[visible(q, k, **how, segments=pair(b)) for k in range(S)] for q in range(T)] for b in range(B)]
    np.testing.assert_array_equal(got, want)


def dense(q, k, v, seen, scale, softcap=None, slopes=None, q_offset=0, kv_offset=0):
    """Loops in float64: (o, lse)."""
    o, lse = np.zeros((B, T, H, v.shape[-1])), np.full((B, H, T), -np.inf)
    for b, t, h in np.ndindex(B, T, H):
        s = np.array([scale * float(q[b, t, h].astype(float) @ k[b, j, h * G // H].astype(float)) for j in range(S)])
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        s = s if slopes is None else s + slopes[h] * (np.arange(S) + kv_offset - t - q_offset)
        e = np.where(seen[b, t], np.exp(s), 0)
        if e.sum():
            o[b, t, h], lse[b, h, t] = (e / e.sum()) @ v[b, :, h * G // H].astype(float), np.log(e.sum())
    return o, lse


@pytest.mark.smoke
@pytest.mark.parametrize(
    "how", [{}, dict(scale=0.3), dict(softcap=0.8), dict(slopes=draw(5, H)), dict(softcap=2.0, slopes=draw(5, H))]
)
def test_values_are_those_of_loops_in_float64(how):
    """Segments, offsets and grouped heads at once; row 4 of the first sequence and rows 3 and 4 of the second see nothing."""
    mask = MaskSpec(True, None, jnp.asarray(Q_SEGMENTS), jnp.asarray(KV_SEGMENTS), 3, 1)
    seen = np.broadcast_to(mask.visible(T, S), (B, T, S))
    want_o, want_lse = dense(Q, KEYS, VALUES, seen, how.get("scale", K**-0.5), how.get("softcap"), how.get("slopes"), 3, 1)
    o, lse = attend(
        Q,
        KEYS,
        VALUES,
        mask,
        scale=how.get("scale"),
        softcap=how.get("softcap"),
        alibi_slopes=how.get("slopes"),
        return_lse=True,
    )
    assert o.shape == (B, T, H, DV)
    assert lse.shape == (B, H, T)
    assert o.dtype == lse.dtype == jnp.float32
    np.testing.assert_allclose(o, want_o, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(
        o, attend(Q, KEYS, VALUES, mask, **{n.replace("slopes", "alibi_slopes"): a for n, a in how.items()})
    )


def test_queries_in_pieces_give_what_they_give_at_once():
    q = draw(3, B, S, H, K)
    whole, lse = attend(q, KEYS, VALUES, CAUSAL, return_lse=True)
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        o, part = attend(q[:, start:stop], KEYS, VALUES, MaskSpec(q_offset=start), return_lse=True)
        np.testing.assert_allclose(o, whole[:, start:stop], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(part, lse[..., start:stop], rtol=1e-6, atol=1e-6)
    # keys in pieces, joined by their log-sum-exps
    parts = [attend(q, KEYS[:, a:b], VALUES[:, a:b], MaskSpec(kv_offset=a), return_lse=True) for a, b in ((0, 4), (4, 7))]
    share = [np.exp(np.asarray(part) - np.asarray(lse)).swapaxes(1, 2)[..., None] for _, part in parts]
    np.testing.assert_allclose(sum(w * o for w, (o, _) in zip(share, parts)), whole, rtol=1e-5, atol=1e-6)


def test_grouped_heads_are_repeated_heads():
    """Values, and gradients: that of a group's keys is the sum over its heads."""

    def loss(q, k, v):
        o, lse = attend(q, k, v, CAUSAL, return_lse=True)
        return (o * draw(6, *o.shape)).sum() + (lse * draw(7, *lse.shape)).sum()

    repeat = lambda a: np.repeat(a, H // G, axis=2)
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    value, grouped = run(Q, KEYS, VALUES)
    same, plain = run(Q, repeat(KEYS), repeat(VALUES))
    np.testing.assert_allclose(value, same, rtol=1e-5)
    np.testing.assert_allclose(grouped[0], plain[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(grouped[1:], plain[1:]):
        np.testing.assert_allclose(a, b.reshape(B, S, G, H // G, -1).sum(3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{}, dict(softcap=0.7, alibi_slopes=draw(8, H))])
def test_gradients_of_output_and_log_sum_exp_are_those_of_finite_differences(how):
    mask = MaskSpec(True, (3, 0), jnp.asarray(Q_SEGMENTS), jnp.asarray(KV_SEGMENTS), 2)

    def loss(args):
        o, lse = attend(*args, mask, **how, return_lse=True)
        return (o * draw(6, *o.shape)).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * draw(7, *lse.shape)).sum()

    args = (Q, KEYS, VALUES)
    grads, loss = jax.jit(jax.grad(loss))(args), jax.jit(loss)
    for i in range(3):
        direction = draw(10 + i, *args[i].shape)
        moved = lambda e, i=i, d=direction: loss((*args[:i], args[i] + e * d, *args[i + 1 :]))
        slope = (float(moved(1e-2)) - float(moved(-1e-2))) / 2e-2
        np.testing.assert_allclose((grads[i] * direction).sum(), slope, rtol=2e-3, atol=1e-3)


# ----------------------------------------------------------------------------------------------- nothing to see
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_row_of_padding_changes_nothing_and_makes_no_nan(backend, dtype):
    """A batch whose second sequence is all padding and whose first begins with padding: zeros, gradient 0, and the
    gradients of the rest are those of the batch without it."""
    segments = jnp.asarray([[-1, -1, 0, 0, 1], [-1] * 5], jnp.int32)
    q, k, v = (jnp.asarray(draw(i, B, T, n, K), dtype) for i, n in enumerate((H, G, G)))
    weight = jnp.asarray(draw(9, B, T, H, K))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def loss(q, k, v):
        rows = len(q)
        mask = MaskSpec(q_segment_ids=segments[:rows], kv_segment_ids=segments[:rows])
        o, lse = attend(q, k, v, mask, return_lse=True, backend=backend)
        seen = (segments[:rows] >= 0)[:, :, None, None]
        return jnp.where(seen, o * weight[:rows], 0).sum() + (o * weight[:rows]).sum(), (o, lse)

    (_, (o, lse)), grads = loss(q, k, v)
    (_, (alone, _)), want = loss(q[:1], k[:1], v[:1])
    padding = np.asarray(segments) < 0
    assert o.dtype == dtype
    assert not np.any(np.asarray(o, np.float32)[padding])
    assert np.all(np.isneginf(np.asarray(lse).swapaxes(1, 2)[padding]))
    assert np.all(np.isfinite(np.asarray(lse).swapaxes(1, 2)[~padding]))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6 if dtype == jnp.float32 else 1e-2, atol=1e-6)
    close(np.asarray(o[:1], np.float32), np.asarray(alone, np.float32))
    for got, one in zip(grads, want):
        got = np.asarray(got, np.float32)
        assert np.isfinite(got).all()
        assert not np.any(got[padding])
        close(got[:1], np.asarray(one, np.float32))


def test_a_window_beyond_the_keys_sees_nothing():
    o, lse = attend(Q, KEYS, VALUES, MaskSpec(window=(1, 0), q_offset=50), return_lse=True)
    assert not np.any(o)
    assert np.isneginf(lse).all()


# ----------------------------------------------------------------------------------------------- types and refusals
def test_softmax_is_in_fp32_under_bf16():
    """600 equal keys: added up in bf16, their weights would stop at 256."""
    ones = jnp.ones((1, 600, 1, 8), jnp.bfloat16)
    o, lse = attend(ones[:, :1], ones, ones, FULL, return_lse=True)
    assert o.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(o, np.float32), 1, rtol=0.01)
    np.testing.assert_allclose(lse, 8**0.5 + np.log(600), rtol=1e-6)


def test_large_scores_do_not_overflow():
    o, lse = attend(100 * Q, 100 * KEYS, VALUES, CAUSAL, return_lse=True)
    assert np.isfinite(o).all()
    assert np.isfinite(lse).all()


def test_a_mask_goes_through_jit_and_its_offset_may_be_traced():
    run = jax.jit(lambda mask, at: attend(Q, KEYS, VALUES, MaskSpec(mask.causal, mask.window, q_offset=at)))
    np.testing.assert_allclose(
        run(MaskSpec(window=(2, 0)), 2), attend(Q, KEYS, VALUES, MaskSpec(window=(2, 0), q_offset=2)), rtol=1e-6, atol=1e-6
    )


def test_what_cannot_be_had_is_refused():
    with pytest.raises(UserError, match=r"no attention back end 'flesh'.*auto.*reference"):
        attend(Q, KEYS, VALUES, CAUSAL, backend="flesh")
    with pytest.raises(ValueError, match="both queries and keys"):
        attend(Q, KEYS, VALUES, MaskSpec(q_segment_ids=jnp.asarray(Q_SEGMENTS)))
