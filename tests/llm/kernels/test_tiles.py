"""Intervals against the dense mask, tile bounds, and joining attention over two sets of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.attention import MaskSpec
from llm.kernels import tiles


def dense(lo, hi, keys):
    return np.asarray(tiles.seen(jnp.asarray(lo), jnp.asarray(hi), 0, keys))


def run_ids(r, length, order):
    """Segments in runs, some of them padding, with ids that rise, fall or are in any order."""
    ends = np.sort(r.integers(0, length + 1, 3))
    run = np.searchsorted(ends, np.arange(length), side="right")
    names = dict(rising=[0, 1, 2, 3], padded_left=[-1, 0, 1, 2], padded_right=[0, 1, 2, -1], any=[7, -1, 2, 40])[order]
    return np.array(names, np.int32)[run]


@settings(max_examples=30)
@given(
    st.sampled_from([1, 7]),
    st.sampled_from([5, 7]),
    st.booleans(),
    st.none() | st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.integers(0, 6),
    st.integers(0, 6),
    st.sampled_from(["", "same", "rising", "padded_left", "padded_right", "any"]),
    st.integers(0, 99),
)
def test_intervals_are_the_dense_mask(queries, keys, causal, window, q_offset, kv_offset, order, seed):
    r = np.random.default_rng(seed)
    ids = {}
    if order == "same":
        keys, both = queries, jnp.asarray(np.stack([run_ids(r, queries, "any") for _ in range(2)]))
        ids = dict(q_segment_ids=both, kv_segment_ids=both)
    elif order:
        draw = lambda n: jnp.asarray(np.stack([run_ids(r, n, order) for _ in range(2)]))
        ids = dict(q_segment_ids=draw(queries), kv_segment_ids=draw(keys))
    mask = MaskSpec(causal, window, **ids, q_offset=q_offset, kv_offset=kv_offset)
    lo, hi = mask.intervals(queries, keys)
    want = np.broadcast_to(mask.visible(queries, keys), (len(lo), queries, keys))
    np.testing.assert_array_equal(dense(lo, hi, keys), want)
    empty = ~want.any(-1)
    assert (np.asarray(lo)[empty] == keys).all()
    assert (np.asarray(hi)[empty] == 0).all()


def test_offset_and_window_may_be_known_at_run_time_only():
    got = jax.jit(lambda left, at: MaskSpec(window=(left, 0), q_offset=at).intervals(5, 7))(2, 3)
    for a, b in zip(got, MaskSpec(window=(2, 0), q_offset=3).intervals(5, 7)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("block_q", "block_k"), [(2, 4), (4, 2), (4, 4), (12, 3), (1, 12)])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_no_tile_outside_the_bounds_is_seen_and_the_outermost_are(block_q, block_k, window):
    segments = jnp.asarray([[0] * 5 + [1] * 4 + [-1] * 3, [-1] * 12], jnp.int32)
    mask = MaskSpec(window=window, q_segment_ids=segments, kv_segment_ids=segments)
    lo, hi = mask.intervals(12, 12)
    tile = dense(lo, hi, 12).reshape(2, 12 // block_q, block_q, 12 // block_k, block_k).any((2, 4))
    first, stop = (np.asarray(a) for a in tiles.bounds(lo, hi, block_q, block_k))
    q_first, q_stop = (np.asarray(a) for a in tiles.query_bounds(jnp.asarray(first), jnp.asarray(stop), 12 // block_k))
    for b, i in np.ndindex(2, 12 // block_q):
        seen = np.flatnonzero(tile[b, i])
        assert (seen[0], seen[-1] + 1) == (first[b, i], stop[b, i]) if len(seen) else first[b, i] >= stop[b, i]
    for b, j in np.ndindex(2, 12 // block_k):
        seen = np.flatnonzero(tile[b, :, j])
        assert not len(seen) or q_first[b, j] <= seen[0] <= seen[-1] < q_stop[b, j]


def test_attention_over_two_sets_of_keys_is_joined_by_the_log_sum_exps():
    r = np.random.default_rng(0)
    s, v = r.normal(size=(4, 6)), r.normal(size=(6, 3))

    def part(some):
        total = np.exp(s[:, some]).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(np.exp(s[:, some]) @ v[some] / total[:, None]), np.log(total)

    for cut in (0, 2, 6):  # at the ends, one of the sets is empty
        got = tiles.merge(*(jnp.asarray(a) for some in (slice(0, cut), slice(cut, 6)) for a in part(some)))
        for a, b in zip(got, part(slice(0, 6))):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    nothing = jnp.zeros((2, 3)), jnp.full(2, -jnp.inf)
    o, lse = tiles.merge(*nothing, *nothing)
    assert not np.any(o)
    assert np.isneginf(lse).all()
