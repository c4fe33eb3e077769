"""What attends to what (MaskSpec) and the attention function that the model calls."""

import dataclasses
import functools
import importlib
import math
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from llm.kernels import backends, libraries, tiles
from llm.kernels.options import Options
from parallel.axes import AXES

BACKENDS = tuple(backends.TABLE)
KERNELS = dict(chunked="chunked", pallas="pallas_attention", mosaic="mosaic_attention")
"""Back end -> module of llm/kernels with `prepare`, `forward` and `backward`; all take and give what chunked.py says."""
LIBRARIES = ("cudnn", "tokamax")
"""Back ends with a differentiation of their own, functions of llm/kernels/libraries.py."""
TENSOR = AXES[-1]
MASKED = tiles.MASKED


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["q_segment_ids", "kv_segment_ids", "q_offset", "kv_offset"],
    meta_fields=["causal", "window"],
)
@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """Which keys a query sees; all conditions hold at once.

    causal: keys at its own position or before. window: (left, right), at most so many keys before and after its position.
    q_segment_ids [B, T], kv_segment_ids [B, S]: keys of the same segment; segments are contiguous and -1 is padding, which
    sees nothing and is not seen. q_offset, kv_offset: the positions of the first query and the first key."""

    causal: bool = True
    window: tuple[int, int] | None = None
    q_segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None
    q_offset: int | jax.Array = 0
    kv_offset: int | jax.Array = 0

    def visible(self, queries: int, keys: int) -> jax.Array:
        """A boolean mask that broadcasts to [B, queries, keys]."""
        q = (jnp.arange(queries) + self.q_offset)[None, :, None]
        k = (jnp.arange(keys) + self.kv_offset)[None, None, :]
        seen = jnp.ones((1, queries, keys), bool)
        if self.causal:
            seen &= k <= q
        if self.window is not None:
            left, right = self.window
            seen &= (k >= q - left) & (k <= q + right)
        if (self.q_segment_ids is None) != (self.kv_segment_ids is None):
            raise ValueError("a mask needs segment ids of both queries and keys, or of neither")
        if self.q_segment_ids is not None:
            seen &= self.q_segment_ids[:, :, None] == self.kv_segment_ids[:, None, :]
            seen &= (self.q_segment_ids >= 0)[:, :, None]
        return seen

    def intervals(self, queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
        """The same in O(T) memory: query i sees the keys [lo_i, hi_i), two int32 arrays that broadcast to [B, queries]."""
        if (self.q_segment_ids is None) != (self.kv_segment_ids is None):
            raise ValueError("a mask needs segment ids of both queries and keys, or of neither")
        segments = None if self.q_segment_ids is None else (self.q_segment_ids, self.kv_segment_ids)
        return tiles.intervals(queries, keys, self.causal, self.window, self.q_offset, self.kv_offset, segments)

    def features(self, queries: int, keys: int) -> set[str]:
        """What a back end must be able to do for it (names of kernels/backends.py)."""
        zero = lambda offset: isinstance(offset, int | np.integer) and offset == 0
        asked = dict(
            full=not self.causal,
            window=self.window is not None,
            packed=self.q_segment_ids is not None,
            offset=not (zero(self.q_offset) and zero(self.kv_offset)),
            cross=queries != keys,
            odd=(queries | keys) % 2 == 1,
        )
        return {name for name, has in asked.items() if has}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: MaskSpec,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
    strict: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(cap(scale q k) + alibi) v with grouped keys; softmax in fp32.

    q [B, T, H, D], k [B, S, K, D], v [B, S, K, Dv] with H a multiple of K -> o [B, T, H, Dv] in q's type, and on request the
    differentiable log-sum-exp [B, H, T] in fp32. A query that sees no key gives 0 (and -inf), with gradient 0.
    scale: 1/sqrt(D) when None. softcap: cap(s) = softcap tanh(s / softcap). alibi_slopes [H]: adds slope (key - query).
    backend: `auto` or one of BACKENDS; kernels/backends.py holds what each can do. `strict` refuses a slow one that `auto`
    would fall back to; `deterministic` asks for bitwise repeatable gradients. Output and log-sum-exp are residuals named
    "attention", so that remat by name does not run a kernel again. Where the mesh has a tensor axis that is left to the
    compiler, heads are split over it by hand, if they divide. Raises UserError when a back end is unknown or cannot do it."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    extra = dict(
        softcap=softcap is not None,
        alibi=alibi_slopes is not None,
        lse=return_lse,
        value=q.shape[-1] != v.shape[-1],
        deterministic=deterministic,
    )
    features = mask.features(q.shape[1], k.shape[1]) | {name for name, has in extra.items() if has}
    dtype = q.dtype.name if q.dtype == k.dtype == v.dtype else "mixed"
    platform, device = backends.target()
    need = backends.Need(dtype, q.shape[-1], frozenset(features))
    name = backends.select(need, platform, backend, strict, device if platform == "gpu" else "")
    if name == "reference":
        o, lse = _reference(q, k, v, mask, scale, softcap, alibi_slopes)
        o = checkpoint_name(o, "attention")
    else:
        ways = _tensor_ways(q.shape[2])
        repeats = ways // math.gcd(ways, k.shape[2])  # as in a replica of keys and values: each device has its own
        k, v = (jnp.repeat(a, repeats, axis=2) if repeats > 1 else a for a in (k, v))
        kind = next((kind for kind in ("packed", "window", "full") if kind in features), "causal")
        options = Options(scale, softcap, name, device if platform == "gpu" else "", kind, ways)
        if name in LIBRARIES:
            return run_library(options, q, k, v)  # those have no log-sum-exp to give
        rows = kernel(name).prepare(mask, q.shape[1], k.shape[1], options)
        o, lse = run_kernel(options, q, k, v, alibi_slopes, rows)
    return (o, lse) if return_lse else o


def kernel(name: str) -> ModuleType:
    """The module of a back end, imported when it is first needed."""
    return importlib.import_module(f"llm.kernels.{KERNELS[name]}")


def chosen(need: backends.Need, target: tuple[str, str], backend: str = "auto", strict: bool = False) -> str:
    """What serves `need` on a target (platform and name of the device), in words. Raises UserError as `attention` does."""
    platform, device = target
    name = backends.select(need, platform, backend, strict, device if platform == "gpu" else "")
    return f"{name} ({backends.TABLE[name].what})"


def _tensor_ways(heads: int) -> int:
    """Over how many devices of a tensor axis that is left to the compiler the heads are split."""
    mesh = get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    ways = mesh.shape[TENSOR] if kinds.get(TENSOR) == AxisType.Auto else 1
    return ways if heads % ways == 0 else 1


HEADS = P(None, None, TENSOR)  # of [B, T, H, D]; [B, H, T] is P(None, TENSOR), [H] is P(TENSOR)


def _by_heads(options: Options, run, in_specs, out_specs):
    """`run` on each device's own heads: a kernel is opaque to the compiler, which would gather what it takes."""
    if options.tensor == 1:
        return run
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR}, check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_kernel(options: Options, q, k, v, slopes, rows):
    """(o, lse) of a back end that has a forward and a backward of its own; rows: from its `prepare`."""
    return _forward_rule(options, q, k, v, slopes, rows)[0]


def _forward_rule(options, q, k, v, slopes, rows):
    run = functools.partial(kernel(options.backend).forward, options=options)
    specs = (HEADS, HEADS, HEADS, P(TENSOR), P()), (HEADS, P(None, TENSOR))
    o, lse = (checkpoint_name(a, "attention") for a in _by_heads(options, run, *specs)(q, k, v, slopes, rows))
    return (o, lse), (q, k, v, slopes, rows, o, lse)


def _backward_rule(options, residuals, cotangents):
    q, k, v, slopes, rows, o, lse = residuals
    do, dlse = cotangents
    delta_BTH = tiles.delta(o, do, lse.swapaxes(1, 2), dlse.swapaxes(1, 2))
    run = functools.partial(kernel(options.backend).backward, options=options)
    by_row = P(None, TENSOR)
    specs = (HEADS, HEADS, HEADS, P(TENSOR), P(), by_row, HEADS, by_row), (HEADS, HEADS, HEADS, P(TENSOR))
    gradients = _by_heads(options, run, *specs)(q, k, v, slopes, rows, lse, do, delta_BTH.swapaxes(1, 2))
    return *gradients, jax.tree.map(lambda _: None, rows)


run_kernel.defvjp(_forward_rule, _backward_rule)


def _library(options: Options, q, k, v):
    run = functools.partial(getattr(libraries, options.backend), options=options)
    return _by_heads(options, run, (HEADS, HEADS, HEADS), HEADS)(q, k, v)


def _library_forward(options, q, k, v):
    """Names what the library keeps for its own backward (output and log-sum-exp), as `_forward_rule` does."""
    o, pull = jax.vjp(functools.partial(_library, options), q, k, v)
    named = {id(a): a for a in (q, k, v)} | {id(o): checkpoint_name(o, "attention")}
    keep = lambda a: named[id(a)] if id(a) in named else checkpoint_name(a, "attention")
    return keep(o), jax.tree.map(keep, pull)


run_library = jax.custom_vjp(_library, nondiff_argnums=(0,))
"""o of a back end that is differentiated by a rule of its own."""
run_library.defvjp(_library_forward, lambda _, pull, do: pull(do))


def _reference(q, k, v, mask, scale, softcap, alibi_slopes):
    (t, h), (s, groups) = q.shape[1:3], k.shape[1:3]
    k, v = (jnp.repeat(a, h // groups, axis=2) for a in (k, v))
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores_BHTS = softcap * jnp.tanh(scores_BHTS / softcap)
    if alibi_slopes is not None:
        distance_TS = (jnp.arange(s) + mask.kv_offset)[None] - (jnp.arange(t) + mask.q_offset)[:, None]
        scores_BHTS += alibi_slopes[:, None, None] * distance_TS
    visible_BHTS = mask.visible(t, s)[:, None]
    scores_BHTS = jnp.where(visible_BHTS, scores_BHTS, MASKED)
    top_BHT1 = jax.lax.stop_gradient(scores_BHTS.max(-1, keepdims=True))
    weights_BHTS = jnp.where(visible_BHTS, jnp.exp(scores_BHTS - top_BHT1), 0)
    total_BHT1 = weights_BHTS.sum(-1, keepdims=True)
    some_BHT1 = total_BHT1 > 0
    total_BHT1 = jnp.where(some_BHT1, total_BHT1, 1)
    o = jnp.einsum("bhts,bshd->bthd", (weights_BHTS / total_BHT1).astype(v.dtype), v)
    lse_BHT = jnp.where(some_BHT1, top_BHT1 + jnp.log(total_BHT1), -jnp.inf)[..., 0]
    return o, lse_BHT
