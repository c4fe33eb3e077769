"""Where there is a GPU: every attention back end against the fp32 reference, on it.

    JAX_PLATFORMS=cuda python -m pytest tests/gpu/test_on_gpu.py

What compiles, and what an interpreter gets right, may still be wrong on a device: run it after each change of jax."""

import jax
import pytest

from experiments.benchmarks.attention import MASKS, able, parity
from llm.kernels.backends import TABLE

if jax.default_backend() != "gpu":
    pytest.skip("there is no GPU here", allow_module_level=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (96, "float32")])
@pytest.mark.parametrize("length", [1000, 1024, 65])
def test_every_back_end_is_right_on_this_gpu(mask, head_dim, dtype, length):
    names = able([name for name in TABLE if name != "reference"], mask, length, head_dim, dtype)
    found = parity(names, mask, length, (8, 2), head_dim, dtype)
    assert all(found["right"].values()), found
