"""The compiled training step for H100: what runs behind what, what is copied, what communicates outside of the ticks."""

import dataclasses

import pytest

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig
from llm.fields import to_dict
from parallel import deviceless

pytestmark = pytest.mark.gpu_compile

# One layer a chunk at the sizes of an 8 B model, the pipe across hosts: how much compute a transfer gets depends on both.
CONFIG = Config(
    ModelConfig(layers=4, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32768, tied=False),
    MeshConfig(data=2, pipe=2, tensor=8),
    PipelineConfig(schedule="interleaved", chunks=2, microbatches=8, remat="none"),
    BatchConfig(rows=16, length=8192),
    optimizer=OptimizerConfig(warmup=2),
    train=TrainConfig(steps=10, dtype="bfloat16"),
)


def compiled(config, **document):
    return deviceless.call("h100", "gpu.programs:step", dict(config=to_dict(config), **document))


@pytest.fixture(scope="module")
def step():
    return compiled(CONFIG)


def rows(step, kind, axis):
    return [row for row in step["facts"]["collectives"] if (row["kind"], row["axis"]) == (kind, axis)]


@pytest.mark.smoke
def test_both_transfers_of_a_steady_tick_lie_behind_the_compute_of_a_chunk(step):
    """The gradient's behind F, the activation's behind B."""
    assert len(step["permutes"]) == 2 and step["steady"] >= 8
    by_slot = {("f_slot" if "f_slot" in source else "receive"): between for source, between in step["permutes"].items()}
    kernels = {slot: [k.rpartition(" ")[2] for k in between if "triton" in k] for slot, between in by_slot.items()}
    products = {slot: sum("cublas" in k or k == "dot" for k in between) for slot, between in by_slot.items()}
    assert "attention_forward" in kernels["receive"] and products["receive"] >= 7  # q, k, v, out, gate, up, down
    assert {"attention_dq", "attention_dkv"} <= set(kernels["f_slot"]) and products["f_slot"] >= 7


@pytest.mark.smoke
def test_a_slot_copies_the_weights_of_one_layer_at_most(step):
    assert set(step["copied"]) == {"f_slot", "b_slot"}  # W reads none
    assert max(step["copied"].values()) <= step["layer"]


@pytest.mark.smoke
def test_zero_communicates_once_a_step(step):
    model = CONFIG.model.resolved()
    layer = 2 * model.width * model.head_dim * (model.heads + model.kv_heads) + 3 * model.width * model.ffn
    weights = (model.layers * layer + 2 * model.vocab * model.width) / 16  # of a GPU: pipe 2, tensor 8
    for kind, size in (("all-gather", 2), ("reduce-scatter", 4)):
        found = rows(step, kind, "data")
        assert found and not any(row["in_loop"] for row in found)
        assert sum(row["bytes"] for row in found) == pytest.approx(size * weights, rel=0.01)
    assert not any(row["in_loop"] for row in step["facts"]["collectives"] if "data" in row["axis"].split("+"))


@pytest.mark.smoke
def test_matrix_products_are_those_of_the_slots(step):
    """F, B and W of a layer are two products of each weight and token, in every tick that holds them; the vocabulary's are
    three a microbatch."""
    model, tokens = CONFIG.model.resolved(), 8192
    layer = 2 * model.width * model.head_dim * (model.heads + model.kv_heads) + 3 * model.width * model.ffn
    ticks = sum(step["slots"]) * 2 * layer / 8
    head = CONFIG.pipeline.microbatches * 3 * 2 * model.vocab * model.width / 16
    assert step["facts"]["matmul_flops"] == pytest.approx(tokens * (ticks + head), rel=0.01)


def test_an_all_gather_planted_in_the_ticks_is_found(step):
    looped = lambda step: [r for r in step["facts"]["collectives"] if r["in_loop"] and r["axis"] == "data"]
    assert not looped(step)
    found = looped(compiled(CONFIG, planted=True))
    ticks = sum(row["count"] for row in found)
    assert step["slots"][0] - 2 <= ticks <= step["slots"][0]  # a phase of one tick is no loop
    assert sum(row["bytes"] for row in found) >= ticks * 8192 * 4096 * 2


def test_what_a_loop_over_layers_costs():
    """Two layers a chunk: both ways hide the transfers along the pipe; one after another they also hide sums over `tensor`,
    those of B behind products of B."""
    two = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, layers=8))
    looped = dataclasses.replace(two, pipeline=dataclasses.replace(two.pipeline, unroll="no"))
    one_by_one, loop = compiled(two), compiled(looped)
    for step in (one_by_one, loop):
        assert min(len(between) for between in step["permutes"].values()) >= 7
    hidden = lambda step: sum(row["count"] for row in rows(step, "all-reduce", "tensor") if row["overlapped"])
    assert hidden(one_by_one) > 0 == hidden(loop)


def test_the_hash_is_that_of_the_traced_step(step):
    """Each process gives the same one."""
    assert step["fingerprint"] == deviceless.call("h100", "gpu.programs:fingerprint", to_dict(CONFIG))
