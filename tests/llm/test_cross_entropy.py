"""The loss over a vocabulary that is split over the pipe (and tensor) axis, against jax.grad of a dense log-softmax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from llm.kernels import cross_entropy
from llm.objective import CrossEntropy
from llm.step import build
from parallel import hlo, vocabulary
from parallel.axes import MANUAL_AXES
from parallel.mesh import make_mesh

B, S, D = 3, 5, 6  # 15 tokens: no number of chunks but 3, 5 and 15 divides them
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
def dense(vocab: int, z_loss: float, spread: float = 1.0, softcap: float = 0.0, objective=CrossEntropy):
    """(value, dh, dw, logp, logits) without any split, by jax.grad."""
    given = inputs(vocab, spread)

    def loss(h, w):
        logits = h @ w.T
        logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
        lse = jax.nn.logsumexp(logits, -1)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), given["targets"][..., None], -1)[..., 0]
        if objective is not CrossEntropy:
            return objective(z_loss)(logp, lse, given), (logp, logits)
        return (given["weights"] * (z_loss * lse**2 - logp)).sum(), (logp, logits)

    (value, (logp, logits)), (dh, dw) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(given["h"], given["w"])
    return value, dh, dw, logp, logits


@dataclasses.dataclass(frozen=True)
class Preference:
    """The rows must have a log-probability above 0 (as an example): no sum over tokens, so all are needed first."""

    z_loss: float
    separable = False

    def __call__(self, logp_BS, lse_BS, side):
        return jax.nn.softplus(-(side["weights"] * (logp_BS + self.z_loss * lse_BS)).sum(-1) / 8).sum()


def by_pipe(
    vocab: int, z_loss: float, sizes: dict, spread: float = 1.0, dtype=jnp.float32, softcap=0.0, objective=CrossEntropy, chunk=0
):
    """The same by the split code on a mesh; what pads the vocabulary holds garbage."""
    given, mesh = inputs(vocab, spread), make_mesh(sizes)
    ways = mesh.shape["pipe"] * mesh.shape["tensor"]
    w = np.pad(given["w"], ((0, -vocab % ways), (0, 0)), constant_values=7.0)
    side = dict(weights=given["weights"])

    def run(h_BSD, w_VD, targets_BS):
        apply = lambda logp, lse: objective(z_loss)(logp, lse, side)
        how = dict(separable=objective.separable, into=jnp.ones(w_VD.shape), chunk=chunk)
        value, dh, dw = cross_entropy.loss_and_gradients(h_BSD, w_VD, targets_BS, vocab, apply, softcap, **how)
        dw = dw - 1
        logp = cross_entropy.log_probabilities(h_BSD, w_VD, targets_BS, vocab, softcap, chunk)
        logits = cross_entropy.local_logits(h_BSD, w_VD, vocab, softcap)
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
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
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


# ----------------------------------------------------------------------------------------------- chunks of tokens
@pytest.mark.parametrize(
    ("objective", "softcap", "sizes", "chunk"),
    [
        (CrossEntropy, 0.0, dict(pipe=2), 4),  # 4 chunks of 4: one token of padding
        (CrossEntropy, 2.0, dict(pipe=2, tensor=2), 8),
        (CrossEntropy, 0.0, dict(), 1),
        (Preference, 0.0, dict(pipe=2), 4),
        (Preference, 2.0, dict(pipe=2, tensor=2), 8),
        (Preference, 2.0, dict(pipe=2), 0),
    ],
)
def test_chunks_give_what_all_tokens_give_at_once(objective, softcap, sizes, chunk):
    value, dh, dw, logp, _ = by_pipe(101, Z_LOSS, sizes, softcap=softcap, objective=objective, chunk=chunk)
    want = dense(101, Z_LOSS, 1.0, softcap, objective)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
    np.testing.assert_allclose(dh, want[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw[:101], want[2], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(logp, want[3], rtol=1e-5, atol=1e-6)


def test_a_chunk_adds_up_in_fp32_under_bf16():
    _, dh, dw, logp, _ = by_pipe(101, 0, dict(pipe=2), dtype=jnp.bfloat16, chunk=4)
    whole = by_pipe(101, 0, dict(pipe=2), dtype=jnp.bfloat16)
    assert dh.dtype == jnp.bfloat16
    assert dw.dtype == logp.dtype == jnp.float32
    np.testing.assert_allclose(dw, whole[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(dh, np.float32), np.asarray(whole[1], np.float32))


def test_a_token_without_weight_may_have_any_target():
    """-1, as ignored positions have it, and an id beyond the vocabulary."""

    def run(outside):
        given = inputs(101)
        targets = np.where(given["weights"] > 0, given["targets"], outside).astype(np.int32)
        apply = lambda logp, lse: CrossEntropy(Z_LOSS)(logp, lse, dict(weights=given["weights"]))
        call = lambda h, w, t: cross_entropy.loss_and_gradients(h, w, t, 101, apply, separable=True, chunk=4)
        mesh = make_mesh({}, jax.devices()[:1])
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(
            given["h"], given["w"], targets
        )

    for outside in (-1, 5000):
        for a, b in zip(run(outside), dense(101, Z_LOSS)):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def compiled(tokens: int, vocab: int, chunk: int, separable: bool = True):
    """The loss and gradients of so many tokens on one device: (jaxpr, compiled)."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    args = shape(1, tokens, 8), shape(vocab, 8), jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    objective = lambda logp, lse: (Z_LOSS * lse**2 - logp).sum()

    def run(h, w, t):
        return cross_entropy.loss_and_gradients(h, w, t, vocab, objective, 3.0, separable=separable, chunk=chunk)

    mesh = make_mesh({}, jax.devices()[:1])
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    return jax.make_jaxpr(mapped)(*args), mapped.lower(*args).compile()


@pytest.mark.parametrize("separable", [True, False])
def test_the_logits_are_never_whole_in_memory(separable):
    tokens, vocab, chunk = 2048, 4096, 128
    whole = 4 * tokens * vocab
    temporary = compiled(tokens, vocab, chunk, separable)[1].memory_analysis().temp_size_in_bytes
    assert temporary < whole / 3 < compiled(tokens, vocab, 0, separable)[1].memory_analysis().temp_size_in_bytes


def test_one_pass_when_the_weights_are_known_and_no_loop_when_one_chunk_is_enough():
    def counts(chunk, separable):
        names = [(e.primitive.name, "scan" in around) for e, around in hlo.equations(compiled(64, 32, chunk, separable)[0])]
        return names.count(("scan", False)), names.count(("dot_general", True)), names.count(("dot_general", False))

    assert counts(16, True) == (1, 3, 0)  # logits and two gradients, in one loop
    assert counts(16, False) == (2, 4, 0)  # logits twice
    assert counts(0, True) == counts(64, True) == counts(0, False) == (0, 0, 3)


def test_the_size_of_a_chunk_follows_from_the_rows_of_a_rank():
    assert cross_entropy._chunks(8192, 131072, 0) == 8
    assert cross_entropy._chunks(8192, 131072 // 4, 0) == 2
    assert cross_entropy._chunks(4096, 32768, 0) == 1


def test_the_pipeline_trains_alike_with_chunks(monkeypatch):
    """Two stages and a tensor axis; 5 tokens at a time of the 16 of a microbatch on a device, then all."""
    config = Config(
        model=ModelConfig(layers=2, width=8, heads=2, ffn=8, vocab=101, z_loss=Z_LOSS, tied=True),
        mesh=MeshConfig(pipe=2, tensor=2),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2),
        batch=BatchConfig(rows=4, length=8),
    )

    def run():
        program = build(config, jax.devices()[:4])
        with jax.set_mesh(program.mesh):
            batch = program.put(reference.batch(4, 8, 101))
            sums, grads = jax.jit(program.gradients)(program.init(), batch, program.device_table)
        return float(sums["loss"]), reference.canonical(program, grads)

    want = run()
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * 51 * 5)
    loss, grads = run()
    assert loss == pytest.approx(want[0], rel=1e-6)
    assert max(reference.difference(want[1], grads).values()) < 1e-5
