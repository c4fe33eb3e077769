"""Every kernel against the dense reference: values, log-sum-exp and all gradients, through the log-sum-exp too.

A covering choice of masks, heads, sizes and tiles, in which every two values of different things meet; `-m matrix` runs their
full product (hours, 6480 programs of each kernel). Each program runs on packed rows and on rows with a padded tail."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.attention import MaskSpec, attention, kernel, run_kernel
from llm.kernels.options import Options
from parallel import hlo

B = 2
BACKENDS = ("chunked", "pallas")


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def packed(length: int) -> np.ndarray:
    """Two documents and a tail of padding; in the second row padding only, but for one token."""
    first = np.repeat([0, 1, -1], [length // 2, length - length // 2 - length // 5, length // 5])
    second = np.full(length, -1)
    second[length // 3] = 4
    return np.stack([first, second]).astype(np.int32)


def padded(length: int) -> np.ndarray:
    """One document a row, and a tail of padding: none in the first row, of half the row in the second."""
    return np.stack([np.zeros(length), np.where(np.arange(length) < (length + 1) // 2, 0, -1)]).astype(np.int32)


def plain(length: int) -> np.ndarray:
    return np.zeros((B, length), np.int32)


def mask_of(name: str, queries: int, keys: int, q_ids, kv_ids) -> MaskSpec:
    at = keys - queries  # the last query sees the last key
    masks = dict(
        causal=MaskSpec(q_offset=at),
        full=MaskSpec(False),
        window=MaskSpec(True, (max(keys // 3, 1), 0), q_offset=at),
        sides=MaskSpec(False, (3, keys // 4), q_offset=5, kv_offset=3),
    )
    return MaskSpec(masks[name].causal, masks[name].window, q_ids, kv_ids, masks[name].q_offset, masks[name].kv_offset)


@functools.cache
def program(backend, mask, queries, keys, scale=None, softcap=None, blocks=(0, 0)):
    """(q, k, v, slopes, segments of queries and keys) -> o, lse, and the gradients of q, k, v and slopes."""

    def attend(q, k, v, slopes, ids):
        spec = mask_of(mask, queries, keys, *ids)
        if backend == "reference":
            how = dict(scale=scale, softcap=softcap, alibi_slopes=slopes)
            o, lse = attention(q, k, v, spec, **how, return_lse=True, backend=backend)
        else:
            options = Options(scale or q.shape[-1] ** -0.5, softcap, backend, block=blocks[0], block_k=blocks[1])
            o, lse = run_kernel(options, q, k, v, slopes, kernel(backend).prepare(spec, queries, keys, options))
        do, dlse = draw(11, *o.shape), draw(12, *lse.shape)
        return (o * do).sum(dtype=jnp.float32) + (jnp.where(jnp.isfinite(lse), lse, 0) * dlse).sum(), (o, lse)

    return jax.jit(jax.value_and_grad(attend, (0, 1, 2, 3), has_aux=True))


def results(backend, mask, arrays, ids, **how):
    """[o, lse, dq, dk, dv, dslopes (if any)] in fp32."""
    blocks = how.pop("blocks")
    run = program(
        backend, mask, arrays[0].shape[1], arrays[1].shape[1], **how, blocks=blocks if backend != "reference" else (0, 0)
    )
    (_, out), gradients = run(*arrays, ids)
    return [np.asarray(a, np.float32) for a in (*out, *gradients) if a is not None]


NAMES = ("o", "lse", "dq", "dk", "dv", "dslopes")


def check(backends, mask, queries, keys, groups, heads, head_dim, value_dim=0, dtype="float32", slopes=None, rows=None, **how):
    """fp32 to 1e-5 of the reference; else within twice the error of the reference, which is that of its own rounding."""
    how.setdefault("blocks", (32, 32))
    shapes = [(queries, heads, head_dim), (keys, groups, head_dim), (keys, groups, value_dim or head_dim)]
    arrays = [jnp.asarray(draw(i, B, *shape), dtype) for i, shape in enumerate(shapes)] + [slopes]
    exact = [a if a is None or i > 2 else a.astype(jnp.float32) for i, a in enumerate(arrays)]
    for segments in rows or (packed, padded):
        ids = segments(queries), segments(keys)
        want = results("reference", mask, exact, ids, **how)
        own = want if dtype == "float32" else results("reference", mask, arrays, ids, **how)
        for backend in backends:
            got = results(backend, mask, arrays, ids, **how)
            for name, a, b, c in zip(NAMES, got, own, want, strict=False):
                seen, where = np.isfinite(c), f"{backend} {name} {segments.__name__}"
                np.testing.assert_array_equal(np.isfinite(a), seen, err_msg=where)
                a, b, c = a[seen], b[seen], c[seen]
                if dtype == "float32":
                    np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-5 * max(1, np.abs(c).max(initial=0)), err_msg=where)
                else:
                    error, allowed = (np.abs(x - c).max(initial=0) for x in (a, b))
                    assert error <= 2 * allowed + 1e-6, where


# ----------------------------------------------------------------------------------------------- the matrix
MATRIX = dict(
    mask=("causal", "full", "window"),
    queries=(1, 17, 63, 65, 200),
    more_keys=(0, 48, -9),
    groups=((2, 2), (4, 2), (8, 1)),
    head_dim=(32, 80, 128, 256),
    softcap=(None, 0.9),
    blocks=((32, 32), (16, 64), (64, 16)),
    dtype=("float32", "bfloat16"),
)


def covering(factors: dict) -> list[dict]:
    """Few rows in which any two values of different factors meet: the best of some random ones, again and again."""
    r, names = np.random.default_rng(0), list(factors)
    pairs = lambda row: {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
    missing = set().union(*(pairs(dict(zip(names, values))) for values in itertools.product(*factors.values())))
    rows = []
    while missing:
        seed = dict(zip((pair := min(missing, key=str))[::2], pair[1::2]))
        some = [{n: seed[n] if n in seed else v[r.integers(len(v))] for n, v in factors.items()} for _ in range(40)]
        rows.append(max(some, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


def check_row(mask, queries, more_keys, groups, head_dim, softcap, blocks, dtype):
    keys = max(queries + more_keys, 1)
    check(BACKENDS, mask, queries, keys, groups[1], groups[0], head_dim, dtype=dtype, softcap=softcap, blocks=blocks)


@pytest.mark.parametrize("row", covering(MATRIX), ids=lambda row: "-".join(map(str, row.values())))
def test_every_two_things_together_are_those_of_the_reference(row):
    check_row(**row)


def pytest_generate_tests(metafunc):
    """The full product only when it is asked for."""
    if "values" in metafunc.fixturenames:
        asked = "matrix" in metafunc.config.getoption("-m")
        ids = lambda values: "-".join(map(str, values))
        metafunc.parametrize("values", list(itertools.product(*MATRIX.values())) if asked else [], ids=ids)


@pytest.mark.matrix
def test_all_things_together_are_those_of_the_reference(values):
    check_row(*values)


SLOPES = draw(5, 4)
CASES = dict(
    # mask, queries, keys, groups, heads, head size
    plain=(("causal", 65, 65, 2, 4, 64), dict(rows=(plain,), scale=0.3)),
    sides=(("sides", 63, 17, 4, 4, 32), dict(softcap=0.9)),
    alibi=(("causal", 65, 63, 1, 4, 32), dict(slopes=SLOPES)),
    alibi_cap=(("window", 17, 63, 2, 4, 32), dict(slopes=SLOPES, softcap=1.5)),
    values=(("causal", 65, 130, 2, 2, 32), dict(value_dim=24)),
    half=(("window", 65, 65, 2, 4, 32), dict(dtype="float16")),
)


@pytest.mark.parametrize("case", [pytest.param("plain", marks=pytest.mark.smoke), *list(CASES)[1:]])
def test_the_rest_of_what_they_do_is_that_of_the_reference(case):
    sizes, how = CASES[case]
    check(BACKENDS, *sizes, **how)


@pytest.mark.parametrize("case", ["sides", "alibi_cap", "half"])
def test_one_tile_is_that_of_the_reference(case):
    sizes, how = CASES[case]
    check(["chunked"], *sizes, value_dim=24, **how, blocks=(0, 0))


@settings(max_examples=4)
@given(
    st.sampled_from(["causal", "window", "full"]),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([1, 2]),
    st.sampled_from([(16, 32), (32, 16)]),
)
def test_any_length_and_tile(mask, queries, keys, groups, blocks):
    check(BACKENDS, mask, queries, keys, groups, 2, 16, blocks=blocks)


# ----------------------------------------------------------------------------------------------- memory and work
def traced(mask_name, length, block, groups=2):
    q, k = jnp.ones((B, length, 4, 8)), jnp.ones((B, length, groups, 8))
    options, ids = Options(1.0, None, "chunked", block=block), packed(length)
    mask = mask_of(mask_name, length, length, ids, ids)

    def run(q, k, v):
        o, pull = jax.vjp(
            lambda *a: run_kernel(options, *a, None, kernel("chunked").prepare(mask, length, length, options)), q, k, v
        )
        return o, pull(o)

    return run, (q, k, k)


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_nothing_of_the_size_of_all_scores_is_ever_made(mask):
    run, args = traced(mask, 300, 32)
    shapes = [v.aval.shape for e, _ in hlo.equations(jax.make_jaxpr(run)(*args)) for v in e.outvars]
    assert max(map(math.prod, shapes)) <= B * 4 * 300 * 32
    assert not [shape for shape in shapes if sum(n >= 300 for n in shape) > 1]


def test_temporary_memory_grows_with_the_length_not_its_square():
    def temporary(length):
        run, args = traced("causal", length, 64)
        return jax.jit(run).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 4.5 * temporary(512)


def test_a_short_row_is_one_tile_without_a_loop():
    run, args = traced("causal", 256, 0)
    assert not {"scan", "while"} & {e.primitive.name for e, _ in hlo.equations(jax.make_jaxpr(run)(*args))}


def test_tiles_that_nobody_sees_are_not_computed():
    """NaN in the keys of another document in other tiles does not reach the result: 0 times NaN would."""
    ids = jnp.asarray([[0] * 64 + [1] * 64] * B, jnp.int32)
    k = jnp.ones((B, 128, 1, 8)).at[:, :64].set(jnp.nan)
    options, mask = Options(1.0, None, "chunked", block=32), MaskSpec(q_segment_ids=ids, kv_segment_ids=ids)
    o, _ = jax.jit(functools.partial(run_kernel, options))(k, k, k, None, kernel("chunked").prepare(mask, 128, 128, options))
    assert np.isfinite(o[:, 64:]).all()
