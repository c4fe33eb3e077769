"""Attention and the loss compiled for GPUs: every cell of the table of back ends, memory, and no communication."""

import pytest

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig, TrainConfig
from llm.fields import to_dict
from llm.kernels.backends import TABLE
from parallel import deviceless

pytestmark = pytest.mark.gpu_compile
OWN = ["reference", "chunked", "pallas", "mosaic"]
LIBRARIES = ["cudnn", "tokamax"]
KERNELS = dict(
    reference=[],
    chunked=[],
    pallas=["attention_dkv", "attention_dq", "attention_forward"],
    mosaic=["attention_dkv", "attention_dq", "attention_forward_hopper"],
)
GIB = 2**30


def call(target, function, **document):
    return deviceless.call(target, f"gpu.kernel_programs:{function}", document)


def cells(target: str, backends: tuple[str, ...], most: int = 0):
    return call(target, "cells", backends=backends, most=most)


def check(compiled):
    for cell in compiled:
        assert cell["kernels"] == KERNELS[cell["backend"]], cell


@pytest.mark.smoke
def test_the_kernels_compile_for_hopper():
    check(cells("h100", ("pallas", "mosaic"), most=3)["compiled"])


@pytest.mark.parametrize("target", deviceless.TARGETS)
def test_forward_and_backward_of_every_claim_compile(target):
    """Each back end has all that the table says, one feature at a time, every type and head size."""
    compiled = cells(target, tuple(OWN))["compiled"]
    check(compiled)
    device = deviceless.TARGETS[target].device
    for name in OWN:
        mine = [cell for cell in compiled if cell["backend"] == name]
        if not TABLE[name].devices or any(kind in device for kind in TABLE[name].devices):
            assert {f for cell in mine for f in cell["features"]} == TABLE[name].features
            assert len({cell["dtype"] for cell in mine} | {"float64"}) == len({*TABLE[name].dtypes, "float64"})
        else:
            assert not mine


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_that_are_there_compile(library):
    """cuDNN's kernels for heads of 256 are left out: jax asks the GPU of this machine whether it is a Hopper."""
    for target in deviceless.TARGETS:
        found = cells(target, (library,))
        if found["missing"]:
            names = ", ".join(" ".join(map(str, (c["dtype"], c["head_dim"], *c["features"]))) for c in found["missing"])
            pytest.skip(f"{TABLE[library].module} is not in the environment; not compiled for {target} or any other: {names}")
        for cell in found["compiled"]:
            assert library != "cudnn" or cell["kernels"] == ["fmhaSoftmax", "fmhaSoftmaxBackward"], cell


@pytest.mark.parametrize("backend", ["pallas", "mosaic", "chunked"])
def test_memory_of_attention_grows_with_the_length(backend):
    """Up to 32k tokens, where a mask alone would be 1 GiB: O(T), and less than one array of all scores by far."""
    sizes = {int(n): size for n, size in call("h100", "temporaries", backend=backend, lengths=[2048, 8192, 32768]).items()}
    for short, long in ((2048, 8192), (8192, 32768)):
        assert sizes[long] < 4.5 * sizes[short], sizes
    assert sizes[32768] < 32768**2 / 2, sizes


@pytest.mark.parametrize("separable", [True, False])
def test_memory_of_the_loss_beside_the_gradients(separable):
    """8k tokens of 4096 numbers and 131k words, in one pass or two: all logits would be 4 GiB in fp32."""
    found = call("h100", "loss", tokens=8192, vocab=131072, width=4096, separable=separable)
    assert found["alias"] >= 131072 * 4096 * 4, "the gradient is not added in place"
    assert found["temporary"] <= 0.8 * GIB, found["temporary"] / GIB


@pytest.mark.parametrize("backend", ["pallas", "mosaic"])
def test_heads_are_split_over_the_tensor_axis_without_communication(backend):
    found = call("h100", "by_heads", backend=backend)
    assert found["collectives"] == []
    assert found["kernels"] == KERNELS[backend]


@pytest.mark.parametrize("backend", ["pallas", "mosaic"])
def test_a_pipeline_step_runs_each_kernel_once_and_gathers_nothing_for_it(backend):
    """Two stages and a tensor axis under selective remat: no more forward kernels than backward ones (under full remat there
    are twice as many), and over the tensor axis only the sums of the layers' outputs and of the loss."""
    config = Config(
        model=ModelConfig(layers=2, width=256, heads=4, vocab=512),
        mesh=MeshConfig(pipe=2, tensor=2),
        batch=BatchConfig(8, 256),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2),
        train=TrainConfig(dtype="bfloat16", attention=backend),
    )
    found = deviceless.call("h100", "llm.compile:compiled_facts", dict(config=to_dict(config), per_host=4))
    counts = {row["name"].split()[1]: row["count"] for row in found["kernels"] if "attention_" in row["name"]}
    assert sorted(counts) == KERNELS[backend]
    forward = counts[KERNELS[backend][-1]]
    assert 0 < forward <= counts["attention_dq"] == counts["attention_dkv"], counts
    assert found["attention"].startswith(backend)
    assert {c["kind"] for c in found["collectives"] if "tensor" in c["axis"]} == {"all-reduce"}
