"""What the Pallas kernels become for GPUs, lowered without one, their tables of tiles, and memory."""

import inspect
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from llm.attention import MaskSpec, attention
from llm.kernels import backends, pallas_blocks
from llm.kernels.options import Options
from llm.kernels.pallas_blocks import blocks
from parallel import hlo

GPUS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200")
IDS = jnp.asarray([[0] * 40 + [1] * 60], jnp.int32)
MASKS = dict(causal=MaskSpec(), full=MaskSpec(False), window=MaskSpec(window=(9, 0)), packed=MaskSpec(True, None, IDS, IDS))
SHARED_MEMORY = dict(A100=163 * 1024, H100=227 * 1024)


def on(gpu: str):
    """As if the program were compiled for this GPU."""
    cores = dict(num_cores=132) if "num_cores" in inspect.signature(AbstractDevice).parameters else {}
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(gpu, platform="cuda", **cores)))


def both_passes(mask="packed", head_dim=64, groups=2, dtype=jnp.bfloat16, **how):
    """(function of forward and backward, shapes of its arguments)."""
    shape = lambda n: jax.ShapeDtypeStruct((1, 100, n, head_dim), dtype)

    def run(q, k, v):
        (o, lse), pull = jax.vjp(lambda *a: attention(*a, MASKS[mask], return_lse=True, **how), q, k, v)
        return o, lse, pull((o, lse))

    return run, (shape(4), shape(groups), shape(groups))


def lowered(gpu: str, *args, **how) -> str:
    run, shapes = both_passes(*args, **how)
    with on(gpu):
        return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(mask="causal", dtype=jnp.float16, groups=1),
        dict(mask="full", dtype=jnp.float32, head_dim=128),
        dict(mask="window", softcap=30.0, head_dim=256),
        dict(head_dim=96, alibi_slopes=jnp.ones(4)),
    ],
    ids=str,
)
def test_auto_lowers_to_three_kernels_for_a_gpu(gpu, how):
    text = lowered(gpu, **how)
    for kernel in ("forward", "dq", "dkv"):
        assert text.count(f'name = "attention_{kernel}"') == 1, kernel
    assert "stablehlo.dot_general" not in text


def test_no_platform_falls_back_silently():
    with on(GPUS[1]):
        assert backends.target() == ("gpu", GPUS[1])
        assert backends.select(backends.Need("bfloat16", 128, frozenset({"packed"})), "gpu", strict=True) == "pallas"


def test_nothing_of_the_size_of_all_scores_is_made():
    run, shapes = both_passes()
    with on(GPUS[1]):
        jaxpr = jax.make_jaxpr(run)(*shapes)
    outside = [e for e, around in hlo.equations(jaxpr) if "pallas_call" not in around]
    assert max(math.prod(v.aval.shape) for e in outside for v in e.outvars) <= 128 * 4 * 64


@pytest.mark.parametrize("gpu", SHARED_MEMORY)
def test_the_tiles_of_the_table_fit_into_shared_memory(gpu):
    """Of each kernel: the tiles that stay and `stages` of those that the loop loads."""
    for head_dim, bits, mask in [(d, bits, m) for d in (16, 64, 128, 256) for bits in (16, 32) for m in MASKS]:
        for name, stay, load in (("forward", 1, 2), ("dq", 2, 2), ("dkv", 2, 2)):
            b = blocks(name, Options(1.0, device=gpu, mask=mask), head_dim, bits, 4096, 4096)
            rows = (b.k, b.q) if name == "dkv" else (b.q, b.k)
            size = (stay * rows[0] + load * b.stages * rows[1]) * head_dim * bits // 8
            assert size <= SHARED_MEMORY[gpu], (name, head_dim, bits, b)
            assert all(n & (n - 1) == 0 for n in (b.q, b.k, b.warps))


def test_short_rows_take_small_tiles_and_the_first_row_that_fits_counts():
    h100 = Options(1.0, device="NVIDIA H100 80GB HBM3")
    assert blocks("forward", h100, 64, 16, 17, 3) == pallas_blocks.Blocks(32, 16, 4, 3)
    a100 = Options(1.0, device="NVIDIA A100-SXM4-80GB")
    assert blocks("dq", a100, 64, 16, 4096, 4096) != blocks("dq", h100, 64, 16, 4096, 4096)
