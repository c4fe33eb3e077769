"""The mathematics of tiled attention in small pure functions, shared by every kernel, whatever its schedule.

A mask is two numbers a query: it sees the keys [lo, hi). Causal masks, windows, packed documents, padding and offsets are all
of this form, in O(T) memory. Scores of a tile have shape [..., q, k], numbers of a row [..., q]; all in fp32. Online softmax:
Milakov and Gimelshein, arXiv 1805.02867; its tiles and their backward: FlashAttention-2, arXiv 2307.08691.
"""

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # a score that is not seen; finite, so that nothing becomes NaN
LOWEST = -1e29  # where the running maximum starts: above MASKED, so that exp(MASKED - maximum) is 0 in a row of nothing else


# ----------------------------------------------------------------------------------------------- intervals
def runs(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each query [B, T] the run [lo, hi) of keys with its segment id, ids in any order but each in one run [B, S].

    O(T + S) memory. Rows of the same array on both sides need no sort."""
    s = kv_ids.shape[1]
    if q_ids is kv_ids:
        new = jnp.concatenate([jnp.ones_like(kv_ids[:, :1], bool), kv_ids[:, 1:] != kv_ids[:, :-1]], axis=1)
        place = jnp.arange(s, dtype=jnp.int32)
        end = jnp.concatenate([new[:, 1:], new[:, :1]], axis=1)  # the first of a row is always new
        lo = lax.cummax(jnp.where(new, place, 0), axis=1)
        return lo, lax.cummin(jnp.where(end, place + 1, s), axis=1, reverse=True)

    def one(q, kv):
        order = jnp.argsort(kv).astype(jnp.int32)
        first, last = (jnp.searchsorted(kv[order], q, side).astype(jnp.int32) for side in ("left", "right"))
        lo = order[jnp.minimum(first, s - 1)]
        return lo, lo + last - first

    return jax.vmap(one)(q_ids, kv_ids)


def intervals(
    queries: int, keys: int, causal: bool, window, q_offset, kv_offset, segments: tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array, jax.Array]:
    """(lo, hi) [B or 1, T] int32: query i sees the keys [lo, hi). One that sees none has lo = keys and hi = 0, which
    moves no minimum of lo and no maximum of hi. Segment id -1 is padding."""
    at = jnp.arange(queries, dtype=jnp.int32)[None] + (jnp.asarray(q_offset, jnp.int32) - kv_offset)  # in places of keys
    lo, hi = jnp.zeros_like(at), jnp.full_like(at, keys)
    if causal:
        hi = jnp.minimum(hi, at + 1)
    if window is not None:
        lo, hi = jnp.maximum(lo, at - window[0]), jnp.minimum(hi, at + 1 + window[1])
    some = lo < hi
    if segments is not None:
        first, stop = runs(*segments)
        lo, hi = jnp.maximum(lo, first), jnp.minimum(hi, stop)
        some = (lo < hi) & (segments[0] >= 0)
    return jnp.where(some, lo, keys), jnp.where(some, hi, 0)


def bounds(lo: jax.Array, hi: jax.Array, block_q: int, block_k: int) -> tuple[jax.Array, jax.Array]:
    """The tiles of keys [first, stop) that each tile of queries sees any of, [B, T / block_q]; an empty range if none."""
    in_tiles = lambda a: a.reshape(a.shape[0], -1, block_q)
    return in_tiles(lo).min(-1) // block_k, -(-in_tiles(hi).max(-1) // block_k)


def query_bounds(first: jax.Array, stop: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array]:
    """The same the other way: a range of tiles of queries outside which none sees a tile of keys, [B, tiles]."""
    n = first.shape[1]
    q, k = jnp.arange(n, dtype=jnp.int32)[:, None], jnp.arange(tiles, dtype=jnp.int32)
    seen = (first[..., None] <= k) & (k < stop[..., None])
    return jnp.where(seen, q, n).min(1), jnp.where(seen, q + 1, 0).max(1)


def seen(lo: jax.Array, hi: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """Which of the keys [start, start + size) rows see, [..., q, size]."""
    k = start + lax.broadcasted_iota(jnp.int32, (*lo.shape, size), lo.ndim)
    return (lo[..., None] <= k) & (k < hi[..., None])


def distances(q_start, queries: int, k_start, keys: int, shift) -> jax.Array:
    """Position of the key minus that of the query, [queries, keys] in fp32; shift: kv_offset - q_offset."""
    k = lax.broadcasted_iota(jnp.int32, (queries, keys), 1) + (k_start + shift)
    return (k - (lax.broadcasted_iota(jnp.int32, (queries, keys), 0) + q_start)).astype(jnp.float32)


# ----------------------------------------------------------------------------------------------- forward
def scores(products: jax.Array, scale: float, softcap: float | None, bias=None) -> jax.Array:
    """cap(scale q k) + bias, before the mask: a cap after it would let masked keys be seen."""
    s = products * scale
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    return s if bias is None else s + bias


def online(top, total, s, seen) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One more tile of a row's softmax: (maximum, total, weights of the tile, factor of what was added up before)."""
    s = jnp.where(seen, s, MASKED)
    new = jnp.maximum(top, s.max(-1))
    weights, factor = jnp.exp(s - new[..., None]), jnp.exp(top - new)
    return new, total * factor + weights.sum(-1), weights, factor


def finish(top, total, summed) -> tuple[jax.Array, jax.Array]:
    """(output, log-sum-exp) of rows; those that saw nothing give 0 and -inf."""
    some = total > 0
    total = jnp.where(some, total, 1)
    return summed * (1 / total)[..., None], jnp.where(some, top + jnp.log(total), -jnp.inf)


def merge(o, lse, other, other_lse) -> tuple[jax.Array, jax.Array]:
    """The attention of rows over two sets of keys from that over each."""
    top = jnp.maximum(jnp.maximum(lse, other_lse), LOWEST)
    a, b = jnp.exp(lse - top), jnp.exp(other_lse - top)
    return finish(top, a + b, a[..., None] * o + b[..., None] * other)


# ----------------------------------------------------------------------------------------------- backward
def delta(o, do, lse, dlse) -> jax.Array:
    """What the gradients of all scores of a row have in common: sum(o do) less the gradient of its log-sum-exp."""
    common = (o.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1) - dlse
    return jnp.where(lse > MASKED, common, 0)


def probabilities(s, lse, seen) -> jax.Array:
    """The softmax of a tile from the log-sum-exps of its rows; 0 in rows that see nothing."""
    return jnp.exp(jnp.where(seen, s, MASKED) - jnp.where(lse > MASKED, lse, 0)[..., None])


def score_gradients(p, dp, delta, products, scale: float, softcap: float | None) -> tuple[jax.Array, jax.Array]:
    """Gradients of scores (and so of a bias) and of `products * scale`, which a cap c makes 1 - tanh(products scale / c)^2
    times smaller."""
    ds = p * (dp - delta[..., None])
    return ds, ds if softcap is None else ds * (1 - jnp.square(jnp.tanh(products * (scale / softcap))))
