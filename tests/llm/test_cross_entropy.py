"""The loss over a vocabulary that is split over the pipe (and tensor) axis, against jax.grad of a dense log-softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llm.kernels import cross_entropy
from llm.objective import CrossEntropy
from parallel import vocabulary
from parallel.axes import MANUAL_AXES
from parallel.mesh import make_mesh

B, S, D = 3, 4, 6
Z_LOSS = 0.02


def inputs(vocab: int, spread: float = 1.0) -> dict[str, np.ndarray]:
    r = np.random.default_rng(vocab)
    return dict(
        h=r.normal(size=(B, S, D)).astype(np.float32),
        w=(spread * r.normal(size=(vocab, D))).astype(np.float32),
        targets=r.integers(0, vocab, (B, S)).astype(np.int32),
        weights=(r.random((B, S)) < 0.6).astype(np.float32),
    )


@functools.cache
def dense(vocab: int, z_loss: float, spread: float = 1.0):
    """(value, dh, dw, logp, logits) without any split, by jax.grad."""
    given = inputs(vocab, spread)

    def loss(h, w):
        logits = h @ w.T
        lse = jax.nn.logsumexp(logits, -1)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), given["targets"][..., None], -1)[..., 0]
        return (given["weights"] * (z_loss * lse**2 - logp)).sum(), (logp, logits)

    (value, (logp, logits)), (dh, dw) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(given["h"], given["w"])
    return value, dh, dw, logp, logits


def by_pipe(vocab: int, z_loss: float, sizes: dict, spread: float = 1.0, dtype=jnp.float32):
    """The same by the split code on a mesh; what pads the vocabulary holds garbage."""
    given, mesh = inputs(vocab, spread), make_mesh(sizes)
    ways = mesh.shape["pipe"] * mesh.shape["tensor"]
    w = np.pad(given["w"], ((0, -vocab % ways), (0, 0)), constant_values=7.0)
    side = dict(weights=given["weights"])

    def run(h_BSD, w_VD, targets_BS):
        objective = lambda logp, lse: CrossEntropy(z_loss)(logp, lse, side)
        value, dh, dw = cross_entropy.loss_and_gradients(h_BSD, w_VD, targets_BS, vocab, objective)
        logp = cross_entropy.log_probabilities(h_BSD, w_VD, targets_BS, vocab)
        logits = cross_entropy.local_logits(h_BSD, w_VD, vocab)
        return value, dh, dw, logp, vocabulary.gather(logits.reshape(B * S, -1))

    out = (P(), P(), P("pipe"), P(), P())
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P("pipe"), P()), out_specs=out, axis_names=set(MANUAL_AXES), check_vma=False
    )
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P(("pipe", "tensor"))))
        return jax.jit(mapped)(given["h"].astype(dtype), w, given["targets"])


@pytest.mark.parametrize(
    ("vocab", "pipe", "tensor", "z_loss"),
    [
        (101, 1, 1, 0),
        (101, 1, 2, Z_LOSS),
        (101, 2, 1, Z_LOSS),
        (101, 4, 1, 0),
        (101, 2, 2, 0),
        (101, 4, 2, Z_LOSS),
        (5, 4, 2, 0),
    ],
)
def test_value_and_gradients_are_those_of_the_dense_loss(vocab, pipe, tensor, z_loss):
    """The last case has ranks with padding only."""
    value, dh, dw, logp, logits = by_pipe(vocab, z_loss, dict(pipe=pipe, tensor=tensor))
    want = dense(vocab, z_loss)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    np.testing.assert_allclose(dh, want[1], rtol=1e-5, atol=1e-6)
    assert dw.shape[0] == -(-vocab // (pipe * tensor)) * pipe * tensor
    np.testing.assert_allclose(dw[:vocab], want[2], rtol=1e-5, atol=1e-6)
    assert not np.any(dw[vocab:]), "a row that pads the vocabulary has a gradient"
    np.testing.assert_allclose(logp, want[3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.reshape(logits[:, :vocab], want[4].shape), want[4], rtol=1e-5, atol=1e-6)
    assert (np.asarray(logits[:, vocab:]) < -1e29).all()


def test_zero_logits_cost_the_logarithm_of_the_vocabulary():
    value, *_, logp, _ = by_pipe(101, 0, dict(pipe=2, tensor=2), spread=0.0)
    np.testing.assert_allclose(logp, -np.log(101), rtol=1e-6)  # 104 rows in memory, of which three count for nothing
    np.testing.assert_allclose(value, np.log(101) * inputs(101)["weights"].sum(), rtol=1e-6)


def test_large_logits_do_not_overflow():
    value, dh, dw, *_ = by_pipe(11, Z_LOSS, dict(pipe=2), spread=1e3)
    want = dense(11, Z_LOSS, 1e3)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
    for got, one in ((dh, want[1]), (dw[:11], want[2])):
        np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-5 * np.abs(one).max())


def test_statistics_stay_in_fp32_under_bf16():
    value, dh, dw, logp, logits = by_pipe(101, 0, dict(pipe=2), dtype=jnp.bfloat16)
    want = dense(101, 0)
    assert dh.dtype == jnp.bfloat16
    assert value.dtype == dw.dtype == logp.dtype == logits.dtype == jnp.float32
    np.testing.assert_allclose(value, want[0], rtol=0.02)
    np.testing.assert_allclose(dw[:101], want[2], atol=0.03 * np.abs(want[2]).max())
