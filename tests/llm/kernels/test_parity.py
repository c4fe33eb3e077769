"""Every kernel against the dense reference: values, log-sum-exp and all gradients, through the log-sum-exp too."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.attention import KERNELS, MaskSpec, attention, kernel, run_kernel
from llm.kernels.options import Options
from parallel import hlo

B = 2


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def segments(length: int) -> jax.Array:
    """Two documents and a tail of padding; in the second row padding only, but for one token."""
    first = np.repeat([0, 1, -1], [length // 2, length - length // 2 - length // 5, length // 5])
    second = np.full(length, -1)
    second[length // 3] = 4
    return jnp.asarray(np.stack([first, second]), jnp.int32)


def mask_of(name: str, queries: int, keys: int) -> MaskSpec:
    q_ids = segments(queries)
    kv_ids = q_ids if queries == keys else segments(keys)
    at = keys - queries  # the last query sees the last key
    return dict(
        causal=MaskSpec(q_offset=at),
        full=MaskSpec(False),
        window=MaskSpec(True, (max(keys // 3, 1), 0), q_offset=at),
        sides=MaskSpec(False, (3, keys // 4), q_offset=5, kv_offset=3),
        packed=MaskSpec(True, None, q_ids, kv_ids, at),
        packed_window=MaskSpec(True, (keys // 4, 0), q_ids, kv_ids, at),
    )[name]


def results(backend, mask, arrays, block, block_k=0, scale=None, softcap=None, slopes=None):
    """(o, lse, gradients of q, k, v and slopes)."""
    q, k, v, slopes = (None if a is None else jnp.asarray(a) for a in (*arrays, slopes))
    shape = (B, q.shape[1], q.shape[2])
    do, dlse = draw(11, *shape, v.shape[-1]), draw(12, *shape).swapaxes(1, 2)

    def attend(q, k, v, slopes):
        if backend == "reference":
            how = dict(scale=scale, softcap=softcap, alibi_slopes=slopes)
            o, lse = attention(q, k, v, mask, **how, return_lse=True, backend=backend)
        else:
            options = Options(scale or q.shape[-1] ** -0.5, softcap, backend, block=block, block_k=block_k)
            o, lse = run_kernel(options, q, k, v, slopes, kernel(backend).prepare(mask, q.shape[1], k.shape[1], options))
        return (o * do).sum(dtype=jnp.float32) + (jnp.where(jnp.isfinite(lse), lse, 0) * dlse).sum(), (o, lse)

    wanted = (0, 1, 2) if slopes is None else (0, 1, 2, 3)
    (_, out), gradients = jax.jit(jax.value_and_grad(attend, wanted, has_aux=True))(q, k, v, slopes)
    return [np.asarray(a, np.float32) for a in (*out, *gradients)]


def check(backend, mask, queries, keys, heads, groups, head_dim, block, value_dim=0, dtype=jnp.float32, tolerance=1e-5, **how):
    shapes = [(queries, heads, head_dim), (keys, groups, head_dim), (keys, groups, value_dim or head_dim)]
    arrays = [jnp.asarray(draw(i, B, *shape), dtype) for i, shape in enumerate(shapes)]
    mask = mask_of(mask, queries, keys)
    want, got = (results(name, mask, arrays, block, **how) for name in ("reference", backend))
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv", "dslopes"), want, got):
        assert a.shape == b.shape
        np.testing.assert_allclose(
            b, a, rtol=tolerance, atol=tolerance * max(1, np.abs(a[np.isfinite(a)]).max(initial=0)), err_msg=name
        )


SLOPES = draw(5, 4)
CASES = dict(
    # mask, queries, keys, heads, groups, head size
    one_token=(("causal", 1, 1, 2, 2, 32), {}),
    one_query=(("causal", 1, 63, 4, 2, 32), {}),
    odd=(("causal", 17, 17, 2, 1, 32), {}),
    causal=(("causal", 65, 65, 8, 1, 64), {}),
    full=(("full", 63, 65, 4, 4, 32), {}),
    window=(("window", 65, 200, 4, 2, 32), {}),
    sides=(("sides", 63, 17, 4, 4, 32), dict(softcap=0.9)),
    packed=(("packed", 65, 65, 4, 2, 64), dict(scale=0.3)),
    packed_cross=(("packed", 17, 65, 2, 2, 32), {}),
    packed_window=(("packed_window", 200, 200, 8, 4, 16), dict(softcap=2.0)),
    alibi=(("packed", 65, 63, 4, 1, 32), dict(slopes=SLOPES)),
    alibi_cap=(("window", 17, 63, 4, 2, 32), dict(slopes=SLOPES, softcap=1.5)),
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", KERNELS)
def test_float32_is_that_of_the_reference(backend, case):
    sizes, how = CASES[case]
    check(backend, *sizes, block=32, **how)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_within_twice_the_error_of_the_reference(backend, dtype):
    shapes = [(65, 4, 32), (65, 2, 32), (65, 2, 32)]
    mask = mask_of("packed", 65, 65)
    arrays = [jnp.asarray(draw(i, B, *shape), dtype) for i, shape in enumerate(shapes)]
    exact = results("reference", mask, [a.astype(jnp.float32) for a in arrays], 0)
    for name, want, own, got in zip(
        ("o", "lse", "dq", "dk", "dv"), exact, *(results(n, mask, arrays, 32) for n in ("reference", backend))
    ):
        some = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), some)
        error, allowed = (np.abs(a[some] - want[some]).max() for a in (got, own))
        assert error <= 2 * allowed + 1e-6, name


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("block", "block_k"), [(16, 64), (64, 16)])
def test_tiles_need_not_be_square(backend, block, block_k):
    check(backend, "packed_window", 65, 65, 4, 2, 32, block, block_k=block_k)
    check(backend, "causal", 65, 130, 2, 2, 32, block, block_k=block_k, value_dim=24)


def test_one_tile_is_that_of_the_reference():
    for name, (sizes, how) in CASES.items():
        if name in ("packed", "sides", "alibi_cap"):
            check("chunked", *sizes, block=0, value_dim=24, **how)


@settings(max_examples=4)
@given(st.sampled_from(["causal", "window", "packed"]), st.integers(1, 40), st.integers(1, 40), st.sampled_from([5, 8, 13]))
def test_any_length_and_tile(mask, queries, keys, block):
    check("chunked", mask, queries, keys, 2, 1, 8, block)


# ----------------------------------------------------------------------------------------------- memory and work
def traced(mask_name, length, block, groups=2):
    q, k = jnp.ones((B, length, 4, 8)), jnp.ones((B, length, groups, 8))
    options, mask = Options(1.0, None, "chunked", block=block), mask_of(mask_name, length, length)

    def run(q, k, v):
        o, pull = jax.vjp(
            lambda *a: run_kernel(options, *a, None, kernel("chunked").prepare(mask, length, length, options)), q, k, v
        )
        return o, pull(o)

    return run, (q, k, k)


@pytest.mark.parametrize("mask", ["causal", "packed_window"])
def test_nothing_of_the_size_of_all_scores_is_ever_made(mask):
    run, args = traced(mask, 300, 32)
    shapes = [v.aval.shape for e, _ in hlo.equations(jax.make_jaxpr(run)(*args)) for v in e.outvars]
    assert max(map(math.prod, shapes)) <= B * 4 * 300 * 32
    assert not [shape for shape in shapes if sum(n >= 300 for n in shape) > 1]


def test_temporary_memory_grows_with_the_length_not_its_square():
    def temporary(length):
        run, args = traced("packed", length, 64)
        return jax.jit(run).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 4.5 * temporary(512)


def test_a_short_row_is_one_tile_without_a_loop():
    run, args = traced("packed", 256, 0)
    assert not {"scan", "while"} & {e.primitive.name for e, _ in hlo.equations(jax.make_jaxpr(run)(*args))}


def test_tiles_that_nobody_sees_are_not_computed():
    """NaN in the keys of another document in other tiles does not reach the result: 0 times NaN would."""
    ids = jnp.asarray([[0] * 64 + [1] * 64] * B, jnp.int32)
    k = jnp.ones((B, 128, 1, 8)).at[:, :64].set(jnp.nan)
    options, mask = Options(1.0, None, "chunked", block=32), MaskSpec(q_segment_ids=ids, kv_segment_ids=ids)
    o, _ = jax.jit(functools.partial(run_kernel, options))(k, k, k, None, kernel("chunked").prepare(mask, 128, 128, options))
    assert np.isfinite(o[:, 64:]).all()
