"""Log-probabilities over a vocabulary that is split over the pipe axis, an objective of them, and its gradients.

Runs inside the manual region: every rank of the pipe holds the same hidden states h_BSD and its own rows w_VD. Nothing here
is differentiated by JAX except the objective itself, which is a function of per-token numbers: so no collective is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from parallel import vocabulary

MASKED = -1e30


def local_logits(h_BSD: jax.Array, w_VD: jax.Array, vocab: int, softcap: float = 0.0) -> jax.Array:
    """This rank's logits [B, S, V/p] in fp32, l -> c tanh(l / c) with a soft-cap; the rows of padding count for nothing."""
    logits_BSV = jnp.einsum("bsd,vd->bsv", h_BSD, w_VD.astype(h_BSD.dtype), preferred_element_type=jnp.float32)
    if softcap:
        logits_BSV = softcap * jnp.tanh(logits_BSV / softcap)
    ids_V = lax.axis_index(vocabulary.AXIS) * w_VD.shape[0] + jnp.arange(w_VD.shape[0])
    return jnp.where(ids_V < vocab, logits_BSV, MASKED)


def _statistics(logits_BSV, targets_BS):
    """Log-probability of the targets, log-sum-exp, softmax slice and where the targets are; one reduction each."""
    top_BS = vocabulary.largest(logits_BSV.max(-1))
    e_BSV = jnp.exp(logits_BSV - top_BS[..., None])
    z_BS = vocabulary.total(e_BSV.sum(-1))
    row_BS, mine_BS = vocabulary.local_ids(targets_BS, logits_BSV.shape[-1])
    hot_BSV = (jnp.arange(logits_BSV.shape[-1]) == row_BS[..., None]) & mine_BS[..., None]
    lse_BS = jnp.log(z_BS) + top_BS
    logp_BS = vocabulary.total(jnp.where(hot_BSV, logits_BSV, 0).sum(-1)) - lse_BS
    return logp_BS, lse_BS, e_BSV / z_BS[..., None], hot_BSV


def log_probabilities(h_BSD: jax.Array, w_VD: jax.Array, targets_BS: jax.Array, vocab: int, softcap: float = 0.0) -> jax.Array:
    """Log-probability of each target, [B, S] in fp32."""
    return _statistics(local_logits(h_BSD, w_VD, vocab, softcap), targets_BS)[0]


def loss_and_gradients(
    h_BSD: jax.Array, w_VD: jax.Array, targets_BS: jax.Array, vocab: int, objective: Callable, softcap: float = 0.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """objective(logp_BS, lse_BS) -> scalar; returns its value, its gradient by h (complete) and by this rank's rows (fp32).

    With l the logits, s their softmax and t the target: d logp / dl = [t] - s and d lse / dl = s; a soft-cap c multiplies
    both by 1 - (l / c)^2."""
    logits_BSV = local_logits(h_BSD, w_VD, vocab, softcap)
    logp_BS, lse_BS, softmax_BSV, hot_BSV = _statistics(logits_BSV, targets_BS)
    value, (dlogp_BS, dlse_BS) = jax.value_and_grad(objective, (0, 1))(logp_BS, lse_BS)
    d_BSV = jnp.where(hot_BSV, dlogp_BS[..., None], 0) + (dlse_BS - dlogp_BS)[..., None] * softmax_BSV
    if softcap:
        d_BSV *= 1 - jnp.square(jnp.maximum(logits_BSV, -softcap) / softcap)  # padding is far below -softcap
    d_BSV = d_BSV.astype(h_BSD.dtype)
    dh_BSD = jnp.einsum("bsv,vd->bsd", d_BSV, w_VD.astype(h_BSD.dtype), preferred_element_type=jnp.float32)
    dw_VD = jnp.einsum("bsv,bsd->vd", d_BSV, h_BSD, preferred_element_type=jnp.float32)
    return value, vocabulary.total(dh_BSD).astype(h_BSD.dtype), dw_VD
