"""Attention in plain JAX, tile by tile: the back end of CPUs, and what every other device can fall back to.

Rows of up to SINGLE queries and keys are one tile and no loop; longer ones a loop over tiles of queries and, inside it, one
over those tiles of keys that some of its rows see. Memory beside inputs and outputs is O(T). Letters: b rows of a batch, g
groups of keys, r heads of a group, q and s places, d and e sizes of keys and values.
"""

import jax
import jax.numpy as jnp
from jax import lax

from llm.kernels import tiles
from llm.kernels.options import Options

SINGLE = BLOCK = 256
F32 = jnp.float32


def prepare(mask, queries: int, keys: int, options: Options) -> tuple:
    """The mask as the two functions below want it: a dense one of a single tile, else the interval of each query."""
    shift = jnp.asarray(mask.kv_offset, jnp.int32) - mask.q_offset
    if not options.block and max(queries, keys) <= SINGLE:
        return mask.visible(queries, keys), shift
    return *mask.intervals(queries, keys), shift


def _dot(how, a, b):
    """An einsum in fp32 that takes the dimensions r and q as one: a plain batch of matrix products, which is faster."""
    terms = how.replace("->", ",").split(",")
    heads, queries = next(a.shape[2:4] for term, a in zip(terms, (a, b)) if "rq" in term)
    flat = [a.reshape(*a.shape[:2], heads * queries, a.shape[4]) if "rq" in term else a for term, a in zip(terms, (a, b))]
    out = jnp.einsum(how.replace("rq", "q"), *flat, preferred_element_type=F32)
    return out.reshape(*out.shape[:2], heads, queries, out.shape[3]) if "rq" in terms[2] else out


def _grouped(a, groups):
    """[B, T, H, D] -> [B, G, R, T, D]"""
    b, t, h, d = a.shape
    return a.reshape(b, t, groups, h // groups, d).transpose(0, 2, 3, 1, 4)


def _ungrouped(a):
    b, g, r, t, d = a.shape
    return a.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, d)


def _rows(a, groups):
    """[B, H, T] -> [B, G, R, T]"""
    return a.reshape(a.shape[0], groups, -1, a.shape[-1])


def _bias(slopes, groups, *place):
    return None if slopes is None else slopes.astype(F32).reshape(groups, -1)[:, :, None, None] * tiles.distances(*place)


def forward(q, k, v, slopes, rows, options: Options) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, Dv] in q's type and lse [B, H, T] in fp32."""
    groups = k.shape[2]
    o, lse = (_forward_tile if len(rows) == 2 else _forward_loop)(_grouped(q, groups), k, v, slopes, rows, options)
    return _ungrouped(o).astype(q.dtype), lse.reshape(lse.shape[0], -1, lse.shape[-1])


def backward(q, k, v, slopes, rows, lse, do, delta, options: Options) -> tuple:
    """Gradients of q, k, v and slopes (None without) from those of o and, in delta [B, H, T], of lse."""
    groups = k.shape[2]
    grouped = (_grouped(q, groups), k, v, slopes, rows, _rows(lse, groups), _grouped(do, groups), _rows(delta, groups))
    dq, dk, dv, dslopes = (_backward_tile if len(rows) == 2 else _backward_loop)(*grouped, options)
    dslopes = None if slopes is None else dslopes.reshape(slopes.shape).astype(slopes.dtype)
    return _ungrouped(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dslopes


# ----------------------------------------------------------------------------------------------- one tile
def _forward_step(carry, q, k, v, bias, seen, options):
    """One more tile of keys: (maximum, total, summed) of each row."""
    top, total, summed = carry
    s = tiles.scores(_dot("bgrqd,bsgd->bgrqs", q, k), options.scale, options.softcap, bias)
    top, total, p, factor = tiles.online(top, total, s, seen)
    return top, total, summed * factor[..., None] + _dot("bgrqs,bsge->bgrqe", p.astype(v.dtype), v)


def _forward_tile(q, k, v, slopes, rows, options):
    seen, shift = rows
    s = _dot("bgrqd,bsgd->bgrqs", q, k)
    s = tiles.scores(s, options.scale, options.softcap, _bias(slopes, k.shape[2], 0, q.shape[3], 0, k.shape[1], shift))
    s = jnp.where(seen[:, None, None], s, tiles.MASKED)
    top = jnp.maximum(s.max(-1), tiles.LOWEST)
    p = jnp.exp(s - top[..., None])
    return tiles.finish(top, p.sum(-1), _dot("bgrqs,bsge->bgrqe", p.astype(v.dtype), v))


def _backward_step(q, k, v, bias, seen, lse, do, delta, options):
    """Gradients of a tile: (ds before the cap, dq, dk, dv)."""
    products = _dot("bgrqd,bsgd->bgrqs", q, k)
    p = tiles.probabilities(tiles.scores(products, options.scale, options.softcap, bias), lse, seen)
    dv = _dot("bgrqs,bgrqe->bsge", p.astype(do.dtype), do)
    dp = _dot("bgrqe,bsge->bgrqs", do, v)
    ds, dproducts = tiles.score_gradients(p, dp, delta, products, options.scale, options.softcap)
    dproducts = dproducts.astype(q.dtype)
    dq, dk = _dot("bgrqs,bsgd->bgrqd", dproducts, k), _dot("bgrqs,bgrqd->bsgd", dproducts, q)
    return ds, options.scale * dq, options.scale * dk, dv


def _dslopes(ds, slopes, *place):
    """Gradient of each head's slope [G, R] from those of its scores."""
    return 0.0 if slopes is None else (ds * tiles.distances(*place)).sum((0, 3, 4))


def _backward_tile(q, k, v, slopes, rows, lse, do, delta, options):
    seen, shift = rows
    place = (0, q.shape[3], 0, k.shape[1], shift)
    bias = _bias(slopes, k.shape[2], *place)
    ds, dq, dk, dv = _backward_step(q, k, v, bias, seen[:, None, None], lse, do, delta, options)
    return dq, dk, dv, _dslopes(ds, slopes, *place)


# ----------------------------------------------------------------------------------------------- loops
def _block(size: int, limit: int) -> int:
    """The size of equal tiles that cover `size` with little padding."""
    return -(-size // -(-size // limit))


def _pad(a, axis, block, value=0):
    missing = -a.shape[axis] % block
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, missing)
    return jnp.pad(a, widths, constant_values=value) if missing else a


def _take(a, axis, i, block):
    return lax.dynamic_slice_in_dim(a, i * block, block, axis)


def _plan(q, k, rows, options):
    """Sizes of tiles, padded intervals, and which tiles of keys any row of the batch sees of each tile of queries."""
    block = options.block or BLOCK
    bq, bk = _block(q.shape[3], block), _block(k.shape[1], options.block_k or block)
    lo, hi = _pad(rows[0], 1, bq, k.shape[1]), _pad(rows[1], 1, bq)
    first, stop = tiles.bounds(lo, hi, bq, bk)
    return bq, bk, lo, hi, first.min(0), stop.max(0)


def _forward_loop(q, k, v, slopes, rows, options):
    length, groups = q.shape[3], k.shape[2]
    bq, bk, lo, hi, first, stop = _plan(q, k, rows, options)
    q, k, v = _pad(q, 3, bq), _pad(k, 1, bk), _pad(v, 1, bk)

    def queries(_, i):
        q_i, lo_i, hi_i = _take(q, 3, i, bq), _take(lo, 1, i, bq), _take(hi, 1, i, bq)

        def keys(j, carry):
            bias = _bias(slopes, groups, i * bq, bq, j * bk, bk, rows[2])
            seen = tiles.seen(lo_i, hi_i, j * bk, bk)[:, None, None]
            return _forward_step(carry, q_i, _take(k, 1, j, bk), _take(v, 1, j, bk), bias, seen, options)

        shape = q_i.shape[:-1]
        start = jnp.full(shape, tiles.LOWEST, F32), jnp.zeros(shape, F32), jnp.zeros((*shape, v.shape[-1]), F32)
        o, lse = tiles.finish(*lax.fori_loop(first[i], stop[i], keys, start))
        return None, (o.astype(v.dtype), lse)

    _, (o, lse) = lax.scan(queries, None, jnp.arange(q.shape[3] // bq))
    joined = lambda a: jnp.moveaxis(a, 0, 3).reshape(*a.shape[1:4], -1, *a.shape[5:])[:, :, :, :length]
    return joined(o), joined(lse)


def _backward_loop(q, k, v, slopes, rows, lse, do, delta, options):
    (length, keys_length), groups = (q.shape[3], k.shape[1]), k.shape[2]
    bq, bk, lo, hi, first, stop = _plan(q, k, rows, options)
    q, do, lse, delta = _pad(q, 3, bq), _pad(do, 3, bq), _pad(lse, 3, bq), _pad(delta, 3, bq)
    k, v = _pad(k, 1, bk), _pad(v, 1, bk)

    def queries(carry, i):
        rows_i = [_take(a, 3, i, bq) for a in (lse, do, delta)]
        q_i, lo_i, hi_i = _take(q, 3, i, bq), _take(lo, 1, i, bq), _take(hi, 1, i, bq)

        def keys(j, carry):
            dq_i, dk, dv, dslopes = carry
            place = (i * bq, bq, j * bk, bk, rows[2])
            seen = tiles.seen(lo_i, hi_i, j * bk, bk)[:, None, None]
            k_j, v_j = _take(k, 1, j, bk), _take(v, 1, j, bk)
            ds, dq, dk_j, dv_j = _backward_step(q_i, k_j, v_j, _bias(slopes, groups, *place), seen, *rows_i, options)
            add = lambda a, a_j: lax.dynamic_update_slice_in_dim(a, _take(a, 1, j, bk) + a_j, j * bk, 1)
            return dq_i + dq, add(dk, dk_j), add(dv, dv_j), dslopes + _dslopes(ds, slopes, *place)

        dq_i, *carry = lax.fori_loop(first[i], stop[i], keys, (jnp.zeros(q_i.shape, F32), *carry))
        return tuple(carry), dq_i.astype(q.dtype)

    dslopes = jnp.zeros(() if slopes is None else q.shape[1:3], F32)
    start = jnp.zeros(k.shape, F32), jnp.zeros(v.shape, F32), dslopes
    (dk, dv, dslopes), dq = lax.scan(queries, start, jnp.arange(q.shape[3] // bq))
    dq = jnp.moveaxis(dq, 0, 3).reshape(*q.shape)[:, :, :, :length]
    return dq, dk[:, :keys_length], dv[:, :keys_length], dslopes
