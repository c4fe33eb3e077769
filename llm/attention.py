"""What attends to what (MaskSpec) and the attention function that the model calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from parallel.errors import UserError

BACKENDS = ("reference",)
MASKED = -1e30  # finite, so that a row without a visible key gives no NaN


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
    backend: `auto` or one of BACKENDS; `strict` refuses what would fall back to another one; `deterministic` asks for
    bitwise repeatable gradients. The reference back end is dense, does everything and always repeats. Raises UserError for
    an unknown back end."""
    if backend not in ("auto", *BACKENDS):
        raise UserError(f"there is no attention back end {backend!r}; choose auto or one of {', '.join(BACKENDS)}")
    del deterministic, strict  # true of the reference back end as it is
    o, lse = _reference(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, softcap, alibi_slopes)
    o = checkpoint_name(o, "attention")
    return (o, lse) if return_lse else o


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
