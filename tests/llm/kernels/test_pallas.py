"""What the Pallas kernels become for GPUs, lowered without one, their tables of tiles, and memory."""

import inspect
import itertools
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
SHARED_MEMORY = {GPUS[0]: 163 * 1024, GPUS[1]: 227 * 1024, "NVIDIA RTX 6000": 99 * 1024}


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
    """The last GPU is one that the table does not name."""
    for head_dim, bits, mask in itertools.product((16, 64, 128, 256), (16, 32), MASKS):
        for name in ("forward", "dq", "dkv"):
            b = blocks(name, Options(1.0, device=gpu, mask=mask), head_dim, bits, 4096, 4096)
            assert pallas_blocks.shared_bytes(name, b, head_dim, bits) <= SHARED_MEMORY[gpu], (name, head_dim, bits, b)
            assert all(n & (n - 1) == 0 for n in (b.q, b.k, b.warps))


def test_a_row_of_the_table_is_found_by_gpu_mask_size_and_type(monkeypatch):
    row = lambda gpu, head_dim, mask, q, bits=16: dict(gpu=gpu, head_dim=head_dim, bits=bits, mask=mask, forward=[q, 16, 4, 1])
    rows = [row("NVIDIA H20", 128, "packed", 1), row("NVIDIA H20", 64, "", 2), row("A100|H100", 64, "", 3), row("", 64, "", 4)]
    monkeypatch.setattr(pallas_blocks, "table", lambda: [*rows, row("", 256, "", 5, 32)])
    first = lambda *key: pallas_blocks.row_for(*key)["forward"][0]
    assert first("NVIDIA H20", "packed", 128, 16) == 1
    assert first("NVIDIA H20", "packed", 64, 16) == 2, "the row of the very head size"
    assert first("NVIDIA H20", "causal", 128, 16) == 5, "no row of another mask"
    assert first("NVIDIA H200", "packed", 64, 16) == 4, "the name of another GPU"
    assert first("NVIDIA H100 80GB HBM3", "causal", 32, 16) == first("NVIDIA A100-SXM4-40GB", "full", 64, 16) == 3
    assert first("NVIDIA H20", "packed", 64, 32) == 5


def test_short_rows_take_small_tiles_and_the_first_row_that_fits_counts():
    h100 = Options(1.0, device="NVIDIA H100 80GB HBM3")
    assert blocks("forward", h100, 64, 16, 17, 3) == pallas_blocks.Blocks(32, 16, 4, 3)
    a100 = Options(1.0, device="NVIDIA A100-SXM4-80GB")
    assert blocks("dq", a100, 64, 16, 4096, 4096) != blocks("dq", h100, 64, 16, 4096, 4096)
