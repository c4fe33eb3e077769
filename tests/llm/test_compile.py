"""The compile command without a compiler: what is refused, the arguments of the step, its hash, shares of branches."""

import jax
import numpy as np
import pytest
import reference

from llm import overrides
from llm.compile import compile_step, share
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from llm.step import build, make_table
from parallel import deviceless
from parallel.errors import UserError

SMALL = Config(
    ModelConfig(layers=4, width=16, heads=2, vocab=64),
    MeshConfig(data=2, pipe=2),
    PipelineConfig(microbatches=4),
    BatchConfig(8, 16),
)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "cluster, gpus, changes, sentence",
    [
        ("nd-h100-v5", 8, {}, r"the mesh \(data 2 x pipe 2\) needs 4 devices and there are 8"),
        ("nd-h100-v6", 4, {}, "there is no cluster nd-h100-v6: did you mean nd-h100-v5"),
        ("mi300x", 4, {}, "has the GPU MI300X, which cannot be compiled for: there are A100-40, A100-80, H100-80, H200, B200"),
        ("nd-h100-v5", 0, {"mesh.data": "-1"}, "say how many there are with --gpus=N"),
        ("nd-h100-v5", 0, {"plan": "auto"}, "say how many there are with --gpus=N"),
        ("nd-h100-v5", 12, {"mesh.data": "6", "batch.rows": "24"}, "12 GPUs do not fill hosts of 8"),
        ("nd-h100-v5", 4, {"pipeline.microbatches": "3"}, "microbatches"),
    ],
)
def test_what_cannot_be_is_refused_before_compiling(cluster, gpus, changes, sentence, monkeypatch):
    monkeypatch.setattr(deviceless, "call", None)
    with pytest.raises(UserError, match=sentence):
        compile_step(overrides.apply(SMALL, changes.items()), cluster, gpus)


@pytest.mark.smoke
@pytest.mark.parametrize("name, gpus", [("llama3_8b", 64), ("llama3_70b", 256), ("llama31_405b", 4096)])
def test_presets_are_made_for_their_gpus(name, gpus):
    config = overrides.load(f"experiments/configs/{name}.py").validate(gpus)
    assert config.batch.length == 8192 and config.batch.rows * config.batch.length >= 1e6
    table = make_table(config, "compute")
    assert -(-config.model.layers // (table.stages * table.chunks)) <= 2  # layers a chunk, which stand one after another


def test_the_planner_chooses_the_layout_when_asked(monkeypatch):
    """The one that it chooses for as many H100, but for what the command line says."""
    given = []
    monkeypatch.setattr(deviceless, "call", lambda target, function, document, *_: given.append((target, document["config"])))
    monkeypatch.setattr(deviceless, "environment", lambda: None)
    changes = [("plan", "auto"), ("mesh.tensor", "2")]
    compile_step(overrides.apply(SMALL, changes), "nd-h100-v5", 8, changes=changes)
    ((target, config),) = given
    assert target == "h100" and config["plan"] == "" and config["mesh"]["tensor"] == 2
    assert np.prod(list(config["mesh"].values())) == 8


def test_the_step_is_compiled_for_what_train_gives_it():
    program = build(SMALL, jax.devices()[:4])
    state, batch, rows, *limit = program.arguments
    given = program.put(reference.batch(8, 16, 64))
    same = lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    for want, real in ((batch, given), (rows, program.device_table), (state, program.init())):
        assert jax.tree.structure(want) == jax.tree.structure(real)
        assert all(map(same, jax.tree.leaves(want), jax.tree.leaves(real)))
    assert not limit
    spiking = overrides.apply(SMALL, [("train.spike", "3")])
    (limit,) = build(spiking, jax.devices()[:4]).arguments[3:]
    assert (limit.shape, limit.dtype) == ((), np.float32)


def test_the_hash_says_which_program_it_is():
    first, again = (build(SMALL, jax.devices()[:4]).fingerprint() for _ in range(2))
    other = build(overrides.apply(SMALL, [("optimizer.clip", "0")]), jax.devices()[:4]).fingerprint()
    assert first == again != other and len(first) == 16
    assert build(SMALL, jax.devices()[4:]).fingerprint() == first  # of the kind of devices, not of these


def test_joint_work_counts_once_a_microbatch():
    program = build(SMALL, jax.devices()[:4])
    taken, ticks = share(program), program.tick_table.length
    assert taken("jit(step)/while/body/f_slot/leave/cond") == pytest.approx(4 / ticks)
    assert taken("jit(step)/while/body/f_slot/cond") == pytest.approx(4 * program.table.chunks / ticks)
    assert taken("jit(step)/somewhere/else/cond") == 1
