"""The compiled training step for H100: what runs behind what, what is copied, what communicates outside of the ticks."""

import dataclasses

import jax
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


MODEL = CONFIG.model.resolved()
LAYER = 2 * MODEL.width * MODEL.head_dim * (MODEL.heads + MODEL.kv_heads) + 3 * MODEL.width * MODEL.ffn
FORWARD = 2 * LAYER * CONFIG.batch.length / CONFIG.mesh.tensor  # FLOPs of a chunk's matrix products, attention's left out


@pytest.mark.smoke
def test_both_transfers_of_a_steady_tick_lie_behind_the_compute_of_a_chunk(step):
    """The gradient's behind F (jax 0.10: all of it; 0.12: its MLP, four fifths), the activation's behind B."""
    assert len(step["permutes"]) == 2 and step["steady"] >= 8
    assert min(step["permutes"]) >= 0.75 * FORWARD


@pytest.mark.smoke
def test_a_slot_copies_the_weights_of_one_layer_at_most(step):
    assert set(step["copied"]) == {"f_slot", "b_slot"}  # W reads none
    assert max(step["copied"].values()) <= step["layer"]


@pytest.mark.smoke
def test_zero_communicates_once_a_step(step):
    weights = (MODEL.layers * LAYER + 2 * MODEL.vocab * MODEL.width) / 16  # of a GPU: pipe 2, tensor 8
    for kind, size in (("all-gather", 2), ("reduce-scatter", 4)):
        found = rows(step, kind, "data")
        assert found and not any(row["in_loop"] for row in found)
        assert sum(row["bytes"] for row in found) == pytest.approx(size * weights, rel=0.01)
    assert not any(row["in_loop"] for row in step["facts"]["collectives"] if "data" in row["axis"].split("+"))


@pytest.mark.smoke
def test_matrix_products_are_those_of_the_slots(step):
    """F, B and W of a layer are two products of each weight and token, in every tick that holds them; the vocabulary's are
    three a microbatch."""
    head = CONFIG.pipeline.microbatches * 3 * 2 * MODEL.vocab * MODEL.width * CONFIG.batch.length / 16
    assert step["facts"]["matmul_flops"] == pytest.approx(sum(step["slots"]) * FORWARD + head, rel=0.01)


def test_an_all_gather_planted_in_the_ticks_is_found(step):
    looped = lambda step: [r for r in step["facts"]["collectives"] if r["in_loop"] and r["axis"] == "data"]
    assert not looped(step)
    found = looped(compiled(CONFIG, planted=True))
    ticks = sum(row["count"] for row in found)
    assert step["slots"][0] - 2 <= ticks <= step["slots"][0]  # a phase of one tick is no loop
    assert sum(row["bytes"] for row in found) >= ticks * 8192 * 4096 * 2


def test_two_layers_a_chunk_hide_both_transfers_one_by_one_and_as_a_loop():
    """At least the MLP of a layer lies behind each; but jax 0.12 thinks a part of the attention enough where the layers stand
    one by one."""
    two = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, layers=8))
    for unroll in ("yes", "no"):
        step = compiled(dataclasses.replace(two, pipeline=dataclasses.replace(two.pipeline, unroll=unroll)))
        least = 0.15 if unroll == "yes" and jax.__version_info__ >= (0, 12) else 0.75
        assert len(step["permutes"]) == 2 and min(step["permutes"]) >= least * FORWARD


def test_the_hash_is_that_of_the_traced_step(step):
    """Each process gives the same one."""
    assert step["fingerprint"] == deviceless.call("h100", "gpu.programs:fingerprint", to_dict(CONFIG))
