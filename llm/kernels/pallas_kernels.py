"""Bodies of the Pallas kernels (Triton style): a program computes one tile of rows and loops over the tiles that these see.

FlashAttention-2 (arXiv 2307.08691); what is computed in a tile is kernels/tiles.py. The gradient takes two kernels, one that
loops over keys for dq and one that loops over queries for dk and dv, so nothing is added up in a random order. Matrices of a
reference have their batch and head indexed away: q [bq, D], k [S, D], v [S, E]; r are the heads of a group."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from llm.kernels import tiles
from llm.kernels.options import Options
from llm.kernels.pallas_blocks import Blocks

F32 = jnp.float32


def _dot(a, b, trans_a=False, trans_b=False):
    """a b in fp32; fp32 inputs are not rounded to tf32."""
    return triton.dot(a, b, trans_a, trans_b, precision=lax.Precision.HIGHEST if a.dtype == F32 else None)


def _bias(slope, shift, q_start, k_start, blocks: Blocks):
    return None if slope is None else slope * tiles.distances(q_start, blocks.q, k_start, blocks.k, shift)


def _slope(slopes_ref, shift_ref, *index):
    return (None, None) if slopes_ref is None else (slopes_ref[index or ...], shift_ref[...])


def forward(first, stop, lo, hi, shift, slopes, q, k, v, o, lse, *, options: Options, blocks: Blocks):
    """o [bq, E], lse [bq] of a tile of queries."""
    q_start, q_tile, lo_tile, hi_tile = pl.program_id(2) * blocks.q, q[...], lo[...], hi[...]
    slope, shift = _slope(slopes, shift)

    def keys(j, carry):
        top, total, summed = carry
        some = pl.ds(j * blocks.k, blocks.k)
        bias = _bias(slope, shift, q_start, j * blocks.k, blocks)
        s = tiles.scores(_dot(q_tile, k[some, :], trans_b=True), options.scale, options.softcap, bias)
        top, total, p, factor = tiles.online(top, total, s, tiles.seen(lo_tile, hi_tile, j * blocks.k, blocks.k))
        return top, total, summed * factor[:, None] + _dot(p.astype(v.dtype), v[some, :])

    start = jnp.full(blocks.q, tiles.LOWEST, F32), jnp.zeros(blocks.q, F32), jnp.zeros((blocks.q, v.shape[-1]), F32)
    out, log_sum = tiles.finish(*lax.fori_loop(first[...], stop[...], keys, start))
    o[...], lse[...] = out.astype(o.dtype), log_sum


def _gradients(q, k, v, do, lse, delta, bias, seen, options):
    """(p, gradients of scores, and before scale and cap) of a tile."""
    products = _dot(q, k, trans_b=True)
    p = tiles.probabilities(tiles.scores(products, options.scale, options.softcap, bias), lse, seen)
    dp = _dot(do, v, trans_b=True)
    return p, *tiles.score_gradients(p, dp, delta, products, options.scale, options.softcap)


def dq(first, stop, lo, hi, shift, slopes, q, k, v, do, lse, delta, dq, dslopes=None, *, options: Options, blocks: Blocks):
    """dq [bq, D] of a tile of queries, and on request [bq], whose sum over all queries is the gradient of the head's slope."""
    q_start = pl.program_id(2) * blocks.q
    slope, shift = _slope(slopes, shift)
    tile = [ref[...] for ref in (q, do, lse, delta)]
    lo_tile, hi_tile = lo[...], hi[...]

    def keys(j, carry):
        some = pl.ds(j * blocks.k, blocks.k)
        k_tile, bias = k[some, :], _bias(slope, shift, q_start, j * blocks.k, blocks)
        seen = tiles.seen(lo_tile, hi_tile, j * blocks.k, blocks.k)
        q_tile, do_tile, *rows = tile
        _, ds, dproducts = _gradients(q_tile, k_tile, v[some, :], do_tile, *rows, bias, seen, options)
        summed = carry[0] + _dot(dproducts.astype(k_tile.dtype), k_tile)
        if slope is None:
            return (summed,)
        return summed, carry[1] + (ds * tiles.distances(q_start, blocks.q, j * blocks.k, blocks.k, shift)).sum(-1)

    start = jnp.zeros(q.shape, F32), jnp.zeros(blocks.q, F32)
    summed, *by_slope = lax.fori_loop(first[...], stop[...], keys, start if slope is not None else start[:1])
    dq[...] = (options.scale * summed).astype(dq.dtype)
    if by_slope:
        dslopes[...] = by_slope[0]


def dkv(first, stop, lo, hi, shift, slopes, q, k, v, do, lse, delta, dk, dv, *, options: Options, blocks: Blocks):
    """dk [bk, D] and dv [bk, E] of a tile of keys; q and do are [T, R, ...] here, lse and delta [R, T], slopes [R]."""
    k_start, k_tile, v_tile = pl.program_id(2) * blocks.k, k[...], v[...]

    def heads(r, carry):
        slope, distance = _slope(slopes, shift, r)

        def queries(i, carry):
            some = pl.ds(i * blocks.q, blocks.q)
            q_tile, do_tile = q[some, r, :], do[some, r, :]
            bias = _bias(slope, distance, i * blocks.q, k_start, blocks)
            seen = tiles.seen(lo[some], hi[some], k_start, blocks.k)
            rows = lse[r, some], delta[r, some]
            p, _, dproducts = _gradients(q_tile, k_tile, v_tile, do_tile, *rows, bias, seen, options)
            dk, dv = carry
            dk = dk + _dot(dproducts.astype(q_tile.dtype), q_tile, trans_a=True)
            return dk, dv + _dot(p.astype(do_tile.dtype), do_tile, trans_a=True)

        return lax.fori_loop(first[...], stop[...], queries, carry)

    start = jnp.zeros(k.shape, F32), jnp.zeros(v.shape, F32)
    summed = lax.fori_loop(0, q.shape[1], heads, start)
    dk[...], dv[...] = (options.scale * summed[0]).astype(dk.dtype), summed[1].astype(dv.dtype)
