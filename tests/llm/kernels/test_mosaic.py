"""The Hopper kernel: what it gives, where jax has an interpreter for its kind (0.12), and that it lowers for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as gpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from llm.attention import MaskSpec, attention
from llm.kernels import mosaic_attention
from llm.kernels.options import Options

interpreted = pytest.mark.skipif(not hasattr(gpu, "force_gpu_interpret_mode"), reason="this jax interprets no Mosaic kernels")
IDS = jnp.asarray([[0] * 150 + [1] * 100 + [-1] * 50, [0] * 20 + [-1] * 280], jnp.int32)
CASES = dict(
    # queries, keys, head size, mask, soft-cap
    causal=(65, 65, 64, MaskSpec(), None),
    full=(17, 200, 64, MaskSpec(False), 0.9),
    one=(1, 130, 64, MaskSpec(q_offset=129), None),
    packed=(300, 300, 64, MaskSpec(True, None, IDS, IDS), 2.0),
    window=(200, 200, 128, MaskSpec(window=(30, 0)), None),
)


def draw(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_the_forward_is_that_of_the_reference(case, monkeypatch):
    """In bf16, within twice the error of the reference; several tiles of keys, so that the ring of buffers goes round, and
    reads of what was not yet written are NaN. The interpreter knows no product of registers that adds up in place."""
    queries, keys, head_dim, mask, softcap = CASES[case]
    rows = 2 if case == "packed" else 1
    q, k, v = draw(0, rows, queries, 2, head_dim), draw(1, rows, keys, 1, head_dim), draw(2, rows, keys, 1, head_dim)
    product = lambda out, p, v: out + jnp.dot(p, v[...], preferred_element_type=jnp.float32)
    monkeypatch.setattr(mosaic_attention, "_add_product", product)
    options = Options(head_dim**-0.5, softcap, "mosaic", device="NVIDIA H100 80GB HBM3")
    with gpu.force_gpu_interpret_mode():
        prepared = mosaic_attention.prepare(mask, queries, keys, options)
        got = mosaic_attention.forward(q, k, v, None, prepared, options)
    how = dict(softcap=softcap, return_lse=True, backend="reference")
    own = attention(q, k, v, mask, **how)
    exact = attention(*(a.astype(jnp.float32) for a in (q, k, v)), mask, **how)
    for a, b, c in zip(got, own, exact):
        a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
        seen = np.isfinite(c)
        np.testing.assert_array_equal(np.isfinite(a), seen)
        assert np.abs(a[seen] - c[seen]).max() <= 2 * np.abs(b[seen] - c[seen]).max() + 2e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_forward_and_backward_lower_for_a_gpu(dtype):
    args = [draw(i, 1, 100, n, 64, dtype=dtype) for i, n in enumerate((4, 2, 2))]

    def run(*args):
        o, pull = jax.vjp(lambda *a: attention(*a, MaskSpec(), backend="mosaic"), *args)
        return pull(o)

    device = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 1
    for name in ("attention_dq", "attention_dkv"):
        assert text.count(f'name = "{name}"') == 1
