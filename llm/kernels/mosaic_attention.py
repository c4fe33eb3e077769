"""Attention forward for Hopper by a Pallas kernel of the Mosaic GPU kind; the backward is that of pallas_attention.py.

Three warp groups a block: one copies tiles of keys and values into a ring of buffers in shared memory by TMA, two compute, 64
queries each, with asynchronous matrix products that read shared memory (FlashAttention-3, arXiv 2407.08608, without its
ping-pong of the two). What is computed is kernels/tiles.py, written again where this kind of kernel wants its arrays laid
out by name. Memory beside inputs and outputs is O(T)."""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from llm.kernels import pallas_attention, tiles
from llm.kernels.options import Options
from llm.kernels.pallas_attention import pad, round_up

prepare, backward = pallas_attention.prepare, pallas_attention.backward

GROUPS = 2  # that compute
ROWS = 64  # queries of each: the rows of one matrix instruction
KEYS = 128  # of a tile
F32 = jnp.float32
WHOLE = ((),) if "idx" in inspect.signature(gpu.load).parameters else ()  # an argument of `load` until jax 0.11


def _stages(head_dim: int) -> int:
    """Tiles of keys and of values in flight: as many as leave room for the queries in 227 KiB."""
    return 2 if head_dim > 64 else 4


def _by_row(x):
    """x of a number for each row of a tile, laid out as what is reduced over its columns."""
    return gpu.layout_cast(x, gpu.Layout.WGMMA.reduce(1))


def _spread(row, columns: int):
    return lax.broadcast_in_dim(row, (row.shape[0], columns), (0,))


def _add_product(out, p, v):
    """out + p v, added up by the matrix instruction."""
    return pl.run_state(lambda acc: gpu.wgmma(acc, p, v))(gpu.ACC.init(out))


def _compute(steps, j_first, options, q, k, v, lo, hi, lse, k_ready, v_ready, k_free, v_free):
    """One warp group: o of its queries into the place of q, and lse; all in shared memory."""
    head_dim, stages = q.shape[-1], k.shape[0]
    load = functools.partial(gpu.load, layout=gpu.Layout.WGMMA.reduce(1))
    lo_row, hi_row = load(lo, *WHOLE), load(hi, *WHOLE)

    def tile(n, carry):
        out, top, total = carry
        slot = lax.rem(n, stages)
        gpu.barrier_wait(k_ready.at[slot])

        def scores(acc):
            gpu.wgmma(acc, q, k.at[slot].transpose((1, 0)))
            return acc[...]

        s = pl.run_scoped(scores, gpu.ACC((ROWS, KEYS), F32)) * options.scale
        gpu.barrier_arrive(k_free.at[slot])
        if options.softcap is not None:
            s = options.softcap * jnp.tanh(s * (1 / options.softcap))
        place = (j_first + n) * KEYS + gpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=gpu.Layout.WGMMA)
        seen = (_spread(lo_row, KEYS) <= place) & (place < _spread(hi_row, KEYS))
        s = jnp.where(seen, s, tiles.MASKED)
        new = jnp.maximum(top, s.max(axis=1))
        p, factor = jnp.exp(s - _spread(new, KEYS)), jnp.exp(top - new)
        total = total * factor + p.sum(axis=1)
        out, p = out * _spread(factor, head_dim), p.astype(v.dtype)
        gpu.barrier_wait(v_ready.at[slot])
        out = _add_product(out, p, v.at[slot])
        gpu.barrier_arrive(v_free.at[slot])
        return out, new, total

    start = (
        gpu.layout_cast(jnp.full((ROWS, head_dim), 0, F32), gpu.Layout.WGMMA),
        _by_row(jnp.full((ROWS,), tiles.LOWEST, F32)),
        _by_row(jnp.full((ROWS,), 0, F32)),
    )
    out, top, total = lax.fori_loop(0, steps, tile, start)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    q[...] = (out / _spread(total, head_dim)).astype(q.dtype)
    lse[...] = jnp.where(some, top + jnp.log(total), -jnp.inf)


def _forward(first, stop, lo, hi, q, k, v, o, lse, *scratch, options: Options, repeat: int):
    q_smem, k_smem, v_smem, lo_smem, hi_smem, lse_smem, q_ready, k_ready, v_ready, k_free, v_free = scratch
    head, i, b = (lax.axis_index(name) for name in ("head", "tile", "batch"))
    group, of_rows = lax.axis_index("group"), jnp.where(lo.shape[0] > 1, b, 0)
    j_first = first[of_rows, i]
    steps = jnp.maximum(stop[of_rows, i] - j_first, 0)

    @pl.when(group < GROUPS)
    def compute():
        gpu.set_max_registers(232, action="increase")
        mine = pl.ds((i * GROUPS + group) * ROWS, ROWS)
        ready, tile = q_ready.at[group], [a.at[group] for a in (q_smem, lo_smem, hi_smem, lse_smem)]
        gpu.copy_gmem_to_smem(q.at[b, mine, head], tile[0], ready)
        gpu.copy_gmem_to_smem(lo.at[of_rows, mine], tile[1], ready)
        gpu.copy_gmem_to_smem(hi.at[of_rows, mine], tile[2], ready)
        gpu.barrier_wait(ready)
        q_tile, lo_tile, hi_tile, lse_tile = tile
        ring = k_ready, v_ready, k_free, v_free
        _compute(steps, j_first, options, q_tile, k_smem, v_smem, lo_tile, hi_tile, lse_tile, *ring)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(q_tile, o.at[b, mine, head])
        gpu.copy_smem_to_gmem(lse_tile, lse.at[b, head, mine])
        gpu.wait_smem_to_gmem(0)

    @pl.when(group == GROUPS)
    def copy():
        gpu.set_max_registers(40, action="decrease")
        stages = k_smem.shape[0]

        @pl.loop(0, steps)
        def tile(n):
            slot = lax.rem(n, stages)
            some = b, pl.ds((j_first + n) * KEYS, KEYS), lax.div(head, repeat)
            for source, buffer, ready, free in ((k, k_smem, k_ready, k_free), (v, v_smem, v_ready, v_free)):
                pl.when(n >= stages)(lambda free=free: gpu.barrier_wait(free.at[slot]))
                gpu.copy_gmem_to_smem(source.at[some], buffer.at[slot], ready.at[slot])


def forward(q, k, v, slopes, rows, options: Options) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, D] in q's type and lse [B, H, T] in fp32. No slopes, and values of the size of keys."""
    (b, t, h, d), (_, s, g, _) = q.shape, k.shape
    block = GROUPS * ROWS
    length, keys, stages = round_up(t, block), round_up(s, KEYS), _stages(d)
    lo, hi = pad(rows[0], 1, length, s), pad(rows[1], 1, length)
    first, stop = tiles.bounds(lo, hi, block, KEYS)
    swizzled = dict(transforms=(gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128)))
    tile = lambda *shape: gpu.SMEM((*shape, d), q.dtype, **swizzled)
    ring = lambda arrivals: gpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    o, lse = gpu.kernel(
        functools.partial(_forward, options=options, repeat=h // g),
        out_type=[jax.ShapeDtypeStruct((b, length, h, d), q.dtype), jax.ShapeDtypeStruct((b, h, length), F32)],
        scratch_types=[
            tile(GROUPS, ROWS),
            tile(stages, KEYS),
            tile(stages, KEYS),
            gpu.SMEM((GROUPS, ROWS), jnp.int32),
            gpu.SMEM((GROUPS, ROWS), jnp.int32),
            gpu.SMEM((GROUPS, ROWS), F32),
            gpu.Barrier(num_arrivals=3, num_barriers=GROUPS),
            ring(1),
            ring(1),
            ring(GROUPS),
            ring(GROUPS),
        ],
        grid=(h, length // block, b),
        grid_names=("head", "tile", "batch"),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name="attention_forward_hopper",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Lane),
    )(first, stop, lo, hi, pad(q, 1, length), pad(k, 1, keys), pad(v, 1, keys))
    return o[:, :t], lse[:, :, :t]
