"""What has gone wrong in attention kernels elsewhere, as a table: each back end is right, or refuses.

The rows name where it was seen. `ask` is what a back end must be able to do for it: one that cannot must refuse. The own
kernels that run on a CPU are tried by `right`; the Hopper forward takes the same masks (test_mosaic.py)."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from llm.attention import MaskSpec, attention, kernel, run_kernel
from llm.kernels import backends, libraries, pallas_blocks
from llm.kernels.backends import TABLE, Need, select
from llm.kernels.options import Options
from parallel import hlo
from parallel.errors import UserError
from parallel.mesh import make_mesh
from parallel.split import split

T, H, G, K, BLOCK = 40, 4, 2, 16, 16
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
IDS = jnp.asarray([[0] * 13 + [1] * 20 + [-1] * 7], jnp.int32)
MASKS = dict(
    causal=MaskSpec(),
    left_window=MaskSpec(False, (5, 0)),  # not causal by name: the future must be hidden all the same
    window=MaskSpec(True, (5, 0)),
    packed=MaskSpec(False, None, IDS, IDS),
    offset=MaskSpec(True, None, q_offset=3, kv_offset=9),
)
ON_CPU = ("chunked", "pallas")


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


ARGS = draw(0, 1, T, H, K), draw(1, 1, T, G, K), draw(2, 1, T, G, K)


def attend(backend, mask, q, k, v, softcap=None, slopes=None, blocks=(BLOCK, BLOCK)):
    """(o, lse)"""
    if backend == "reference":
        return attention(q, k, v, mask, softcap=softcap, alibi_slopes=slopes, return_lse=True, backend=backend)
    options = Options(q.shape[-1] ** -0.5, softcap, backend, block=blocks[0], block_k=blocks[1])
    return run_kernel(options, q, k, v, slopes, kernel(backend).prepare(mask, q.shape[1], k.shape[1], options))


@functools.cache
def compiled(backend, mask, softcap=None):
    """(q, k, v, do) -> o and gradients; jitted."""

    def run(q, k, v, do):
        o, pull = jax.vjp(lambda *a: attend(backend, MASKS[mask], *a, softcap)[0], q, k, v)
        return o, pull(do)

    return jax.jit(run)


def agrees(backend, mask, arrays, tolerance=1e-5, **how):
    """Output and gradients (of the slopes too) are those of the reference."""
    blocks, slopes = how.pop("blocks", (BLOCK, BLOCK)), how.pop("slopes", None)

    def run(name, *arrays):
        o, pull = jax.vjp(lambda q, k, v, slopes: attend(name, mask, q, k, v, slopes=slopes, blocks=blocks, **how)[0], *arrays)
        return o, pull(jnp.cos(o))

    run = jax.jit(run, static_argnums=0)
    for a, b in zip(*(jax.tree.leaves(run(name, *arrays, slopes)) for name in (backend, "reference"))):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, float(jnp.abs(b).max())))


# ----------------------------------------------------------------------------------------------- what is tried
def no_leak(backend, *masks):
    """Huge keys and values that one query must not see change nothing of it, not even a bit, and get no gradient from it.
    With a soft-cap, which would show them if it came after the mask."""
    q, k, v = ARGS
    for mask in masks:
        run, seen = compiled(backend, mask, 5.0), np.asarray(MASKS[mask].visible(T, T))[0]
        for i in (0, 12, 25, T - 1):
            hidden = ~seen[i][None, :, None, None]
            only_i = jnp.zeros(q.shape).at[:, i].set(1)
            o, (dq, dk, dv) = run(q, k, v, only_i)
            changed, _ = run(q, jnp.where(hidden, 50.0, k), jnp.where(hidden, 1e4, v), only_i)
            np.testing.assert_array_equal(changed[:, i], o[:, i])
            for d in (dk, dv):
                assert not np.any(np.where(hidden, d, 0))
            assert np.any(dv) == seen[i].any()
            assert np.any(dk) or seen[i].sum() < 2  # the softmax of a single key is 1, whatever the key
            if not seen[i].any():
                assert not np.any(o[:, i])
                assert not np.any(dq)


def low_log_sum_exps(backend):
    """All scores of a row far below what exp can hold; a length of three halves of 128. Scores of -500 are rounded to 3e-5."""
    q, k, v = (jnp.concatenate([a] * 5, axis=1)[:, :192] for a in ARGS)
    arrays = -12 * jnp.abs(q), 12 * jnp.abs(k), v
    lse = attend("reference", MaskSpec(), *arrays)[1]
    assert (lse < -88.7).all()
    agrees(backend, MaskSpec(), arrays, tolerance=2e-4)


def odd_lengths(backend):
    for length in (17, 192):  # more of them: test_parity.py
        q, k, v = (jnp.concatenate([a] * 5, axis=1)[:, :length] for a in ARGS)
        agrees(backend, MASKS["window"], (q, k, v), blocks=(32, 32))


def unequal_lengths(backend):
    """Positions are said, not guessed: the same keys, from the first position on or up to the last query's."""
    q, (_, k, v) = ARGS[0][:, :7], ARGS
    agrees(backend, MaskSpec(q_offset=T - 7), (q, k, v))
    agrees(backend, MaskSpec(), (ARGS[0], k[:, :9], v[:, :9]))


def tall_tiles(backend):
    for blocks in ((64, 16), (16, 64)):
        agrees(backend, MaskSpec(), tuple(jnp.concatenate([a, a], axis=1) for a in ARGS), blocks=blocks)


def learned_bias(backend):
    """Slopes of the positions, with a gradient that sums over a batch of two."""
    arrays = tuple(jnp.concatenate([a, a[:, ::-1]]) for a in ARGS)
    agrees(backend, MASKS["causal"], arrays, slopes=draw(3, H))


def sharded_inputs(backend):
    """Queries, keys and values split over the tensor axis, inside the region that is manual over the others: no
    communication, and the numbers of one device."""
    mesh = make_mesh(dict(tensor=2), jax.devices()[:2])

    def run(q, k, v):
        o, pull = jax.vjp(lambda *a: attention(*a, MASKS["packed"], backend=backend), q, k, v)
        return o, *pull(jnp.cos(o))

    want = jax.jit(run)(*ARGS)
    inside = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data", "pipe"}, check_vma=False)
    with jax.set_mesh(mesh):
        heads = P(None, None, "tensor")
        args = [jax.device_put(a, heads) for a in ARGS]
        program = jax.jit(inside, out_shardings=heads).lower(*args).compile()
        got = program(*args)
    assert not hlo.collectives(program.as_text())
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def mapped(backend):
    """A mapped call is one of a larger batch, with heads of 48."""
    q, k, v = (jnp.tile(jnp.concatenate([a, a[:, ::-1]]), 3) for a in ARGS)
    run = functools.partial(attend, backend, MASKS["window"])
    got = jax.jit(jax.vmap(lambda *a: jax.tree.map(lambda o: o[0], run(*(x[None] for x in a)))))(q, k, v)
    for a, b in zip(got, jax.jit(run)(q, k, v)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def repeats(backend):
    first, again = (compiled(backend, "packed", 5.0)(*ARGS, ARGS[0]) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def nothing_seen(backend):
    """A batch with a row of padding only, and a row that begins with some."""
    ids = jnp.asarray([[-1] * 5 + [0] * 35, [-1] * T], jnp.int32)
    arrays = tuple(jnp.concatenate([a, a]) for a in ARGS)
    mask = MaskSpec(True, None, ids, ids)
    agrees(backend, mask, arrays)

    @jax.jit
    def run(*arrays):
        (o, lse), pull = jax.vjp(lambda *a: attend(backend, mask, *a), *arrays)
        return o, lse, pull((jnp.ones_like(o), jnp.zeros_like(lse)))

    o, lse, gradients = run(*arrays)
    assert not np.any(o[1])
    assert np.isneginf(lse[1]).all()
    assert all(np.isfinite(g).all() and not np.any(g[1]) for g in gradients)


def log_sum_exp_gradient(backend):
    """Of a loss of the log-sum-exp alone, which is the softmax: 1 in all over the keys of a query."""
    q, k, v = ARGS
    dk = jax.jit(jax.grad(lambda k: attend(backend, MASKS["causal"], q, k, v)[1].sum()))(k)
    want = jax.jit(jax.grad(lambda k: attend("reference", MASKS["causal"], q, k, v)[1].sum()))(k)
    assert jnp.abs(want).max() > 0.1
    np.testing.assert_allclose(dk, want, rtol=1e-5, atol=1e-5)


def tiles_by_device(backend):
    """A GPU that the table does not name gets tiles that fit the smallest."""
    for kernel_name, head_dim in itertools.product(("forward", "dq", "dkv"), (64, 128, 256)):
        b = pallas_blocks.blocks(kernel_name, Options(1.0, device="NVIDIA GB10"), head_dim, 16, 4096, 4096)
        assert pallas_blocks.shared_bytes(kernel_name, b, head_dim, 16) <= 99 * 1024


def by_generation(backend):
    """cuDNN's heads of 256 begin with Hopper; the kernels for Hopper are for nothing else."""
    lacks = lambda name, dim, device: TABLE[name].lacks(Need("bfloat16", dim), "gpu", device)
    assert lacks("cudnn", 256, A100) == "heads of size 256"
    assert "heads" not in lacks("cudnn", 256, H100)
    assert lacks("mosaic", 64, A100) == f"attention on a {A100}"
    assert lacks("mosaic", 64, "NVIDIA B200") == "attention on a NVIDIA B200"
    assert lacks("pallas", 256, A100) == ""


def lowered_for_a_gpu(backend):
    """What the interpreter runs is also what a GPU's compiler gets: the same kernels lower (tests/gpu compiles them, and
    tests/gpu/test_on_gpu.py runs them where there is a GPU)."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    def run(q, k, v):
        o, pull = jax.vjp(lambda *a: attention(*a, MASKS["packed"], backend=backend), q, k, v)
        return pull(o)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(H100, 132, "cuda"))):
        text = jax.jit(run).trace(*ARGS).lower(lowering_platforms=("cuda",)).as_text()
    kernels = ("attention_forward", "attention_dq", "attention_dkv") if backend == "pallas" else ()
    assert [text.count(f'name = "{name}"') for name in kernels] == [1] * len(kernels)


def no_silent_fall_back(backend):
    """Whoever asks for one gets it or an error; `strict` refuses what nobody would choose."""
    select.cache_clear()
    assert select(Need("float32", 8), "cpu", backend) == backend
    with pytest.raises(UserError, match="fall back to chunked on a gpu"):
        select(Need("bfloat16", 512), "gpu", strict=True, device=H100)
    with pytest.raises(UserError, match=f"{backend} cannot do"):
        select(Need("float64", 8), "cpu", backend)


@dataclasses.dataclass(frozen=True)
class Trap:
    """where: who had it. ask: features, head size and type without which nobody can. right: what is tried on the CPU."""

    where: str
    right: Callable
    ask: frozenset = frozenset()
    head_dim: int = 64
    dtype: str = "bfloat16"


asks = lambda *names: frozenset(names)
leak = lambda *masks: functools.partial(lambda backend, masks: no_leak(backend, *masks), masks=masks)
TRAPS = {
    1: Trap("a left window that is not causal sees the future (jax 39576)", leak("left_window"), asks("full", "window")),
    2: Trap("segment ids ignored in training (maxtext 4476)", leak("packed"), asks("packed")),
    3: Trap("NaN gradients with a bias in fp32 (jax 32242)", learned_bias, asks("alibi"), dtype="float32"),
    4: Trap("NaN when lse < -88.7 and T % 128 = 64 with a mask (pytorch 196678)", low_log_sum_exps, asks("packed")),
    5: Trap("wrong when T is no multiple of a tile (jax 27224, 23819)", odd_lengths, asks("odd")),
    6: Trap("wrong when there are fewer queries than keys (jax 24491)", unequal_lengths, asks("cross")),
    7: Trap("too few tiles of keys when those of queries are taller (jax 17314)", tall_tiles),
    8: Trap("gradient of a bias for a batch of 1 only (jax 30593)", learned_bias, asks("alibi")),
    9: Trap("strides of the backward with sharded inputs (jax 25986)", sharded_inputs),
    10: Trap("all-gathers around a kernel (marin 6874)", sharded_inputs),
    11: Trap("segmentation fault with heads of 48 under vmap (jax 23701)", mapped, head_dim=48),
    12: Trap("packed rows with unused segments (jax 30023)", nothing_seen, asks("packed")),
    13: Trap("packed rows and large heads on older GPUs (xla 22826)", by_generation, asks("packed"), head_dim=256),
    14: Trap("tiles larger than the shared memory of a small GPU (tokamax 1361)", tiles_by_device),
    15: Trap("a soft-cap after the mask shows the future (flash-attention 1025)", leak("causal", "window"), asks("softcap")),
    16: Trap("vmap and jacobian of a kernel (jax 38495)", mapped),
    17: Trap("gradients that do not repeat (xla 14125)", repeats, asks("deterministic")),
    18: Trap("wrong on a GPU after a change of the compiler (xla 19780)", lowered_for_a_gpu),
    19: Trap("rows that see nothing make NaN (pytorch 41508)", nothing_seen, asks("packed")),
    20: Trap("interpreted and compiled kernels differ (jax 33260, 23181)", lowered_for_a_gpu),
    21: Trap("a silent fall-back to a slow path (marin 7013)", no_silent_fall_back),
    22: Trap("the gradient of the log-sum-exp is lost (jax.nn, return_residual)", log_sum_exp_gradient, asks("lse")),
    23: Trap("offsets of queries and keys", leak("offset"), asks("offset")),
}


@functools.cache
def tried(right, backend):
    """Rows that differ only by who had it are tried once."""
    right(backend)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("number", TRAPS)
def test_what_went_wrong_elsewhere_is_right_here(number, backend):
    tried(TRAPS[number].right, backend)


@pytest.mark.parametrize("backend", ["mosaic", "cudnn", "tokamax"])
@pytest.mark.parametrize("number", TRAPS)
def test_or_it_is_refused(number, backend, monkeypatch):
    """On a GPU that has them and with the libraries there: what the table does not claim raises, and what it claims is tried
    elsewhere (test_mosaic.py; on a GPU, tests/gpu/test_on_gpu.py)."""
    monkeypatch.setattr(backends, "_found", lambda module: True)
    select.cache_clear()
    trap = TRAPS[number]
    need = Need(trap.dtype, trap.head_dim, trap.ask)
    row = TABLE[backend]
    low, high, step = row.head_dims
    claimed = (
        trap.ask <= row.features and trap.dtype in row.dtypes and low <= trap.head_dim <= high and not trap.head_dim % step
    )
    if claimed:
        assert select(need, "gpu", backend, device=H100) == backend
    else:
        with pytest.raises(UserError, match=f"the attention back end {backend} cannot do"):
            select(need, "gpu", backend, device=H100)


REFUSED = dict(
    mosaic={3, 8, 11, 13},
    cudnn={1, 2, 3, 4, 5, 6, 8, 11, 12, 13, 15, 17, 19, 22, 23},
    tokamax={1, 2, 3, 4, 6, 8, 11, 12, 13, 17, 19, 22, 23},
)


def test_who_refuses_what(monkeypatch):
    """The same as a list, so that a change of the table is seen."""
    monkeypatch.setattr(backends, "_found", lambda module: True)
    lacks = lambda name, trap: TABLE[name].lacks(Need(trap.dtype, trap.head_dim, trap.ask), "gpu", H100)
    assert {name: {n for n, trap in TRAPS.items() if lacks(name, trap)} for name in REFUSED} == REFUSED


# ----------------------------------------------------------------------------------------------- the rest
def layer_with(backend, mask, groups=G):
    def layer(w, ctx, state, x):
        o = attention(x * w, x[:, :, :groups], x[:, :, groups : 2 * groups], mask, backend=backend)
        return x + jnp.sin(o), state, {}

    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("attention"))


@pytest.mark.parametrize("backend", ON_CPU)
def test_the_backward_does_not_run_the_forward_again(backend):
    """Remat that keeps what is named "attention" keeps the residuals of the kernel."""
    q = ARGS[0]
    programs = split(layer_with(backend, MASKS["packed"]), jnp.ones(()), (), {}, q, {})
    stash = sorted(a.shape for a in programs.a + programs.aw)
    assert stash == sorted([q.shape, q.shape, (1, H, T)]), "more or less than the layer's input, output and log-sum-exp"
    backward = jax.make_jaxpr(programs.backward)(
        jnp.ones(()), (), {}, *(jax.tree.map(jnp.zeros_like, s) for s in (programs.a, programs.aw)), q
    )
    calls = [e.params["name"] for e, _ in hlo.equations(backward) if e.primitive.name == "pallas_call"]
    assert sorted(calls) == (["attention_dkv", "attention_dq"] if backend == "pallas" else [])
    assert programs.matmuls == ((2, 5, 0) if backend == "chunked" else programs.matmuls)


def test_a_library_gets_what_it_needs_and_is_not_run_again(monkeypatch):
    """With a stand-in for cuDNN that keeps output and log-sum-exp for a backward of its own: the adapter's arguments are
    right, and remat by name keeps both."""

    @jax.custom_vjp
    def op(q, k, v):
        return attend("chunked", mask, q, k, v)[0]

    def forward(q, k, v):
        o, lse = attend("chunked", mask, q, k, v)
        return o, (q, k, v, o, lse)

    def backward(residuals, do):
        q, k, v, o, lse = residuals
        return jax.vjp(lambda *a: attend("chunked", mask, *a)[0] + 0 * lse.sum() * o, q, k, v)[1](do)

    op.defvjp(forward, backward)
    said = {}

    def stand_in(q, k, v, **how):
        said.update(how)
        return op(q, k, v)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    for mask in (MASKS["causal"], MaskSpec(False)):
        options = Options(0.5, None, "cudnn", H100, "causal" if mask.causal else "full")
        libraries.cudnn(*ARGS, options)
        assert said == dict(scale=0.5, is_causal=mask.causal, implementation="cudnn")
    mask = MASKS["causal"]
    monkeypatch.setattr(backends, "select", lambda *a: "cudnn")
    programs = split(layer_with("cudnn", mask), jnp.ones(()), (), {}, ARGS[0], {})
    assert sorted(a.shape for a in programs.a + programs.aw) == sorted([ARGS[0].shape] * 2 + [(1, H, T)])


def test_the_choice_is_said_once(caplog):
    select.cache_clear()
    with caplog.at_level(logging.INFO, logger="llm.kernels.backends"):
        for _ in range(2):
            attention(*ARGS, MASKS["causal"])
    assert len(caplog.records) == 1
