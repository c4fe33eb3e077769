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


def test_kernels_that_spill_registers_are_found(monkeypatch):
    """None does with the registers it wants; with few, attention's kernels do."""
    assert deviceless.call("h100", "gpu.programs:spilling", 1024) == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_ptx_compiler_extra_flags=--maxrregcount=32")
    worst = {row["kernel"]: row["bytes"] for row in deviceless.call("h100", "gpu.programs:spilling", 1024)}
    assert {"attention_forward", "attention_dq", "attention_dkv"} <= {name.rstrip("_0123456789") for name in worst}
    assert min(worst.values()) > 0
