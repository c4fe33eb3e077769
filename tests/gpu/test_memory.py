"""Memory of the kernels, as XLA plans it for an H100."""

import pytest

from parallel import deviceless

pytestmark = pytest.mark.gpu_compile


def test_memory_of_attention_is_linear_in_the_length():
    lengths = [2048, 8192, 32768]
    short, middle, long = deviceless.call("h100", "gpu.programs:attention_temporaries", lengths)
    assert short > 0
    assert middle <= 4.2 * short and long <= 16.8 * short
    assert long < 32768 * 32768 * 2  # one head's scores in bf16


@pytest.mark.smoke
def test_memory_of_the_loss_at_a_large_vocabulary():
    """8k tokens, 131k entries, width 4096: the logits alone would be 2 GiB in bf16."""
    memory = deviceless.call("h100", "gpu.programs:cross_entropy_memory", [8192, 131072, 4096])
    gradients = 2 * 8192 * 4096 + 4 * 131072 * 4096  # of the hidden states in bf16, of the weights in fp32 as they add up
    assert gradients <= memory["results"] < gradients + 1024
    assert memory["temporaries"] <= 0.8 * 2**30


@pytest.mark.parametrize("target", ["a100-80g", "h100"])
def test_no_kernel_of_attention_spills_registers(target):
    found = deviceless.call(target, "gpu.programs:assembled", 128)
    assert {"attention_forward", "attention_dq", "attention_dkv"} <= set(found["seen"])
    assert found["spills"] == []
