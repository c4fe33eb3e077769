"""Log-probabilities over a vocabulary that is split over the pipe axis, an objective of them, and its gradients.

Runs inside the manual region: every rank of the pipe holds the same hidden states h_BSD and its own rows w_VD. Nothing here
is differentiated by JAX except the objective itself, which is a function of per-token numbers: so no collective is.

Logits are never whole in memory: tokens are taken in chunks, each with its gradients, so that logits live for one chunk. A
microbatch that fits into one chunk is one, without a loop. Letters as in llm/model.py; N tokens, flat; C of them a chunk."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from parallel import vocabulary

MASKED = -1e30
CHUNK_BYTES = 2**29
"""Of a chunk's fp32 logits on one rank of the pipe; more is faster: each chunk reads and writes the gradient of w."""


def local_logits(h_BSD: jax.Array, w_VD: jax.Array, vocab: int, softcap: float = 0.0) -> jax.Array:
    """This rank's logits [B, S, V/p] in fp32, l -> c tanh(l / c) with a soft-cap; the rows of padding count for nothing."""
    logits_BSV = jnp.einsum("bsd,vd->bsv", h_BSD, w_VD.astype(h_BSD.dtype), preferred_element_type=jnp.float32)
    if softcap:
        logits_BSV = softcap * jnp.tanh(logits_BSV / softcap)
    ids_V = lax.axis_index(vocabulary.AXIS) * w_VD.shape[0] + jnp.arange(w_VD.shape[0])
    return jnp.where(ids_V < vocab, logits_BSV, MASKED)


def _hot(targets_BS, rows):
    """Which of this rank's rows is the target of a token, [B, S, V/p]."""
    row_BS, mine_BS = vocabulary.local_ids(targets_BS, rows)
    return (jnp.arange(rows) == row_BS[..., None]) & mine_BS[..., None]


def _statistics(logits_BSV, targets_BS):
    """Log-probability of the targets, log-sum-exp, softmax slice and where the targets are; one reduction each."""
    top_BS = vocabulary.largest(logits_BSV.max(-1))
    e_BSV = jnp.exp(logits_BSV - top_BS[..., None])
    z_BS = vocabulary.total(e_BSV.sum(-1))
    hot_BSV = _hot(targets_BS, logits_BSV.shape[-1])
    lse_BS = jnp.log(z_BS) + top_BS
    logp_BS = vocabulary.total(jnp.where(hot_BSV, logits_BSV, 0).sum(-1)) - lse_BS
    return logp_BS, lse_BS, e_BSV / z_BS[..., None], hot_BSV


def _chunks(tokens: int, rows: int, chunk: int) -> int:
    """Into how many chunks so many tokens are cut; chunk: the most tokens of one (0: as CHUNK_BYTES allows)."""
    return -(-tokens // (chunk or max(1, CHUNK_BYTES // (4 * rows))))


def _cut(a_BS: jax.Array, n: int) -> jax.Array:
    """[B, S, ...] -> [n, 1, C, ...], the last one padded with zeros."""
    flat = a_BS.reshape(-1, *a_BS.shape[2:])
    flat = jnp.pad(flat, [(0, -len(flat) % n), *[(0, 0)] * (flat.ndim - 1)])
    return flat.reshape(n, 1, -1, *flat.shape[1:])


def _joined(a_n1C: jax.Array, like_BS: jax.Array) -> jax.Array:
    """The inverse of `_cut`, of the shape [B, S, ...] of `like_BS`."""
    return a_n1C.reshape(-1, *a_n1C.shape[3:])[: like_BS.shape[0] * like_BS.shape[1]].reshape(
        *like_BS.shape[:2], *a_n1C.shape[3:]
    )


def log_probabilities(
    h_BSD: jax.Array, w_VD: jax.Array, targets_BS: jax.Array, vocab: int, softcap: float = 0.0, chunk: int = 0
) -> jax.Array:
    """Log-probability of each target, [B, S] in fp32."""
    return _both(h_BSD, w_VD, targets_BS, vocab, softcap, chunk)[0]


def likelihood(
    h_BSD: jax.Array, w_VD: jax.Array, targets_BS: jax.Array, vocab: int, softcap: float = 0.0, chunk: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target (fp32), and whether it is the most likely token (of equal ones the lowest id), [B, S]."""

    def one(h_BSD, targets_BS):
        logits_BSV = local_logits(h_BSD, w_VD, vocab, softcap)
        logp_BS, _, _, hot_BSV = _statistics(logits_BSV, targets_BS)
        target_BS = vocabulary.total(jnp.where(hot_BSV, logits_BSV, 0).sum(-1))[..., None]
        ids_V = lax.axis_index(vocabulary.AXIS) * w_VD.shape[0] + jnp.arange(w_VD.shape[0])
        before_BSV = (logits_BSV > target_BS) | ((logits_BSV == target_BS) & (ids_V < targets_BS[..., None]))
        return logp_BS, vocabulary.total(before_BSV.sum(-1)) == 0

    return _each_chunk(one, h_BSD, targets_BS, len(w_VD), chunk)


def _both(h_BSD, w_VD, targets_BS, vocab, softcap, chunk):
    """Log-probability of each target and log-sum-exp, [B, S]."""
    one = lambda h_BSD, targets_BS: _statistics(local_logits(h_BSD, w_VD, vocab, softcap), targets_BS)[:2]
    return _each_chunk(one, h_BSD, targets_BS, len(w_VD), chunk)


def _each_chunk(one, h_BSD, targets_BS, rows, chunk):
    """one(h_BSD, targets_BS) -> arrays [B, S], of all chunks together."""
    n = _chunks(targets_BS.size, rows, chunk)
    if n == 1:
        return one(h_BSD, targets_BS)
    _, out = lax.scan(lambda _, xs: (None, one(*xs)), None, (_cut(h_BSD, n), _cut(targets_BS, n)))
    return tuple(_joined(a, targets_BS) for a in out)


def _gradients(h_BSD, w_VD, logits_BSV, softmax_BSV, hot_BSV, dlogp_BS, dlse_BS, softcap):
    """Gradients by h (complete) and by this rank's rows, from those by log-probability and log-sum-exp.

    With l the logits, s their softmax and t the target: d logp / dl = [t] - s and d lse / dl = s; a soft-cap c multiplies
    both by 1 - (l / c)^2."""
    d_BSV = jnp.where(hot_BSV, dlogp_BS[..., None], 0) + (dlse_BS - dlogp_BS)[..., None] * softmax_BSV
    if softcap:
        d_BSV *= 1 - jnp.square(jnp.maximum(logits_BSV, -softcap) / softcap)  # padding is far below -softcap
    d_BSV = d_BSV.astype(h_BSD.dtype)
    dh_BSD = jnp.einsum("bsv,vd->bsd", d_BSV, w_VD.astype(h_BSD.dtype), preferred_element_type=jnp.float32)
    dw_VD = jnp.einsum("bsv,bsd->vd", d_BSV, h_BSD, preferred_element_type=jnp.float32)
    return vocabulary.total(dh_BSD).astype(h_BSD.dtype), dw_VD


def loss_and_gradients(
    h_BSD: jax.Array,
    w_VD: jax.Array,
    targets_BS: jax.Array,
    vocab: int,
    objective: Callable,
    softcap: float = 0.0,
    *,
    separable: bool = False,
    into: jax.Array | None = None,
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """objective(logp_BS, lse_BS) -> scalar; returns its value, its gradient by h (complete) and by this rank's rows (fp32).

    separable: the objective is a sum over tokens, so that its derivative by a token's numbers depends on these only: then each
    chunk is seen once; of any other objective twice, first for all log-probabilities. A token without weight in it has no
    gradient, whatever its target. into: what the gradient by the rows is added to. chunk: the most tokens at a time (0: as
    many as CHUNK_BYTES allows)."""
    n = _chunks(targets_BS.size, len(w_VD), chunk)
    if n == 1:
        logits_BSV = local_logits(h_BSD, w_VD, vocab, softcap)
        logp_BS, lse_BS, softmax_BSV, hot_BSV = _statistics(logits_BSV, targets_BS)
        value, by_token = jax.value_and_grad(objective, (0, 1))(logp_BS, lse_BS)
        dh_BSD, dw_VD = _gradients(h_BSD, w_VD, logits_BSV, softmax_BSV, hot_BSV, *by_token, softcap)
        return value, dh_BSD, dw_VD if into is None else into + dw_VD

    def slope(both_n1C):
        whole = lambda both_n1C: objective(*(_joined(a, targets_BS) for a in both_n1C))
        return jax.value_and_grad(whole)(both_n1C)

    def once(carry, xs):
        (dw_VD, both_n1C), (i, h_1CD, targets_1C) = carry, xs
        logits_1CV = local_logits(h_1CD, w_VD, vocab, softcap)
        *both_1C, softmax_1CV, hot_1CV = _statistics(logits_1CV, targets_1C)
        both_n1C = tuple(all_.at[i].set(one) for all_, one in zip(both_n1C, both_1C))
        by_token = (d[i] for d in slope(both_n1C)[1])  # the other chunks do not matter to this one
        dh_1CD, dw = _gradients(h_1CD, w_VD, logits_1CV, softmax_1CV, hot_1CV, *by_token, softcap)
        return (dw_VD + dw, both_n1C), dh_1CD

    def again(dw_VD, xs):
        h_1CD, targets_1C, lse_1C, *by_token = xs
        logits_1CV = local_logits(h_1CD, w_VD, vocab, softcap)
        softmax_1CV = jnp.exp(logits_1CV - lse_1C[..., None])
        dh_1CD, dw = _gradients(h_1CD, w_VD, logits_1CV, softmax_1CV, _hot(targets_1C, len(w_VD)), *by_token, softcap)
        return dw_VD + dw, dh_1CD

    dw_VD = jnp.zeros(w_VD.shape, jnp.float32) if into is None else into
    h_n1CD, targets_n1C = _cut(h_BSD, n), _cut(targets_BS, n)
    if separable:
        empty_n1C = jnp.zeros(targets_n1C.shape, jnp.float32)
        start = dw_VD, (empty_n1C, empty_n1C)
        (dw_VD, both_n1C), dh_n1CD = lax.scan(once, start, (jnp.arange(n), h_n1CD, targets_n1C))
        value = slope(both_n1C)[0]
    else:
        both_n1C = tuple(_cut(a, n) for a in _both(h_BSD, w_VD, targets_BS, vocab, softcap, chunk))
        value, by_token = slope(both_n1C)
        dw_VD, dh_n1CD = lax.scan(again, dw_VD, (h_n1CD, targets_n1C, both_n1C[1], *by_token))
    return value, _joined(dh_n1CD, targets_BS), dw_VD
