"""Attention by own Pallas kernels for GPUs of compute capability 8.0 and above; on a CPU they are interpreted.

Lengths are padded to tiles and head sizes to powers of two here; the kernels know only whole tiles. Memory beside inputs
and outputs is O(T)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from llm.kernels import pallas_kernels, tiles
from llm.kernels.options import Options
from llm.kernels.pallas_blocks import Blocks, blocks, power_of_two


def prepare(mask, queries: int, keys: int, options: Options) -> tuple:
    """(lo, hi) [B or 1, T] and kv_offset - q_offset."""
    return *mask.intervals(queries, keys), jnp.asarray(mask.kv_offset, jnp.int32) - mask.q_offset


def pad(a, axis, size, value=0):
    widths = [(0, 0)] * a.ndim
    widths[axis] = (0, size - a.shape[axis])
    return jnp.pad(a, widths, constant_values=value) if size > a.shape[axis] else a


def _whole(a, length):
    """[B, T, H, D] with T padded to `length` and D to a power of two."""
    return pad(pad(a, 1, length), 3, power_of_two(a.shape[3]))


def round_up(size: int, block: int) -> int:
    return -(-size // block) * block


class _Call:
    """One kernel on one set of arguments: padded sizes, and how its programs see each array."""

    def __init__(self, kernel: str, q, k, rows, options: Options):
        (_, t, h, d), (_, s, g, _) = q.shape, k.shape
        self.kernel, self.options, self.heads, self.groups = kernel, options, h, g
        self.blocks: Blocks = blocks(kernel, options, power_of_two(d), 8 * q.dtype.itemsize, t, s)
        self.t, self.s = round_up(t, self.blocks.q), round_up(s, self.blocks.k)
        lo, hi, self.shift = pad(rows[0], 1, self.t, s), pad(rows[1], 1, self.t), rows[2]
        first, stop = tiles.bounds(lo, hi, self.blocks.q, self.blocks.k)
        if kernel == "dkv":
            first, stop = tiles.query_bounds(first, stop, self.s // self.blocks.k)
        self.rows = first, stop, lo, hi

    def _batch(self, a):
        """Index of the batch in `a`, which may be the same for all rows of it."""
        return (lambda b: b) if a.shape[0] > 1 else (lambda b: 0)

    def _bounds(self, a):
        at = self._batch(a)
        return pl.BlockSpec((None, None), lambda b, _, i: (at(b), i))

    def _interval(self, a):
        at = self._batch(a)
        if self.kernel == "dkv":
            return pl.BlockSpec((None, self.t), lambda b, _, i: (at(b), 0))
        return pl.BlockSpec((None, self.blocks.q), lambda b, _, i: (at(b), i))

    def _keys(self, a):
        if self.kernel == "dkv":
            return pl.BlockSpec((None, self.blocks.k, None, a.shape[3]), lambda b, g, j: (b, j, g, 0))
        repeat = self.heads // self.groups
        return pl.BlockSpec((None, self.s, None, a.shape[3]), lambda b, h, i: (b, 0, h // repeat, 0))

    def _queries(self, a):
        if self.kernel == "dkv":
            return pl.BlockSpec((None, self.t, self.heads // self.groups, a.shape[3]), lambda b, g, j: (b, 0, g, 0))
        return pl.BlockSpec((None, self.blocks.q, None, a.shape[3]), lambda b, h, i: (b, i, h, 0))

    def _by_row(self, a):
        if self.kernel == "dkv":
            return pl.BlockSpec((None, self.heads // self.groups, self.t), lambda b, g, j: (b, g, 0))
        return pl.BlockSpec((None, None, self.blocks.q), lambda b, h, i: (b, h, i))

    def _slopes(self):
        if self.kernel == "dkv":
            return pl.BlockSpec((self.heads // self.groups,), lambda b, g, j: (g,))
        return pl.BlockSpec((None,), lambda b, h, i: (h,))

    def __call__(self, slopes, q, k, v, gradient: tuple, out: dict[str, jax.ShapeDtypeStruct]):
        """gradient: (do, lse, delta) or nothing. out: each result with what it is like: queries, keys or by_row."""
        q, k, v = _whole(q, self.t), _whole(k, self.s), _whole(v, self.s)
        spec = dict(queries=self._queries, keys=self._keys, by_row=self._by_row)
        ins, specs = [*self.rows], [*map(self._bounds, self.rows[:2]), *map(self._interval, self.rows[2:])]
        has_slopes = slopes is not None
        if has_slopes:
            ins += [self.shift.reshape(1), slopes.astype(jnp.float32)]
            specs += [pl.BlockSpec((None,), lambda *_: (0,)), self._slopes()]
        ins += [q, k, v]
        specs += [self._queries(q), self._keys(k), self._keys(v)]
        if gradient:
            do, lse, delta = gradient
            ins += [_whole(do, self.t), pad(lse, 2, self.t), pad(delta, 2, self.t)]
            specs += [self._queries(ins[-3]), self._by_row(lse), self._by_row(delta)]

        def body(*refs):
            head, rest = refs[:4], refs[4:]
            extra, rest = (rest[:2], rest[2:]) if has_slopes else ((None, None), rest)
            getattr(pallas_kernels, self.kernel)(*head, *extra, *rest, options=self.options, blocks=self.blocks)

        dkv = self.kernel == "dkv"
        tiles_of_rows = self.s // self.blocks.k if dkv else self.t // self.blocks.q
        return pl.pallas_call(
            body,
            grid=(q.shape[0], self.groups if dkv else self.heads, tiles_of_rows),
            in_specs=specs,
            out_specs=[spec[kind](a) for kind, a in out],
            out_shape=[a for _, a in out],
            interpret=not self.options.device,
            name=f"attention_{self.kernel}",
            compiler_params=triton.CompilerParams(num_warps=self.blocks.warps, num_stages=self.blocks.stages),
        )(*ins)


def forward(q, k, v, slopes, rows, options: Options) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, Dv] in q's type and lse [B, H, T] in fp32."""
    (b, t, h, _), e = q.shape, v.shape[3]
    call = _Call("forward", q, k, rows, options)
    o = jax.ShapeDtypeStruct((b, call.t, h, power_of_two(e)), q.dtype)
    lse = jax.ShapeDtypeStruct((b, h, call.t), jnp.float32)
    o, lse = call(slopes, q, k, v, (), [("queries", o), ("by_row", lse)])
    return o[:, :t, :, :e], lse[:, :, :t]


def backward(q, k, v, slopes, rows, lse, do, delta, options: Options) -> tuple:
    """Gradients of q, k, v and slopes (None without) from those of o and, in delta [B, H, T], of lse."""
    (b, t, h, d), (_, s, g, e) = q.shape, v.shape
    gradient, like = (do, lse, delta), functools.partial(jax.ShapeDtypeStruct, dtype=q.dtype)
    call = _Call("dq", q, k, rows, options)
    out = [("queries", like((b, call.t, h, power_of_two(d))))]
    if slopes is not None:
        out += [("by_row", jax.ShapeDtypeStruct((b, h, call.t), jnp.float32))]
    dq, *by_slope = call(slopes, q, k, v, gradient, out)
    call = _Call("dkv", q, k, rows, options)
    out = [("keys", like((b, call.s, g, power_of_two(n)))) for n in (d, e)]
    dk, dv = call(slopes, q, k, v, gradient, out)
    dslopes = by_slope[0].sum((0, 2)).astype(slopes.dtype) if by_slope else None
    return dq[:, :t, :, :d], dk[:, :s, :, :d], dv[:, :s, :, :e], dslopes
