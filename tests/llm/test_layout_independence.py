"""A training run does not depend on its layout: 30 steps on one device and on four layouts of eight, and stopped at step 12
on one layout and resumed on another through a checkpoint. AdamW, dropout, clipping, packed rows with unequal token counts."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import reference

from llm.checkpoint import Checkpoints
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, TrainConfig
from llm.step import build

STEPS, STOP, ROWS, LENGTH, VOCAB = 30, 12, 16, 8, 37
CONFIG = Config(
    model=ModelConfig(layers=5, width=16, heads=4, kv_heads=2, ffn=24, vocab=VOCAB, dropout=0.1, z_loss=1e-3),
    batch=BatchConfig(rows=ROWS, length=LENGTH),
    optimizer=OptimizerConfig(lr=1e-2, warmup=3, clip=0.5),
    train=TrainConfig(steps=STEPS, seed=3),
)
LAYOUTS = dict(
    one_device=(MeshConfig(), PipelineConfig(microbatches=2)),
    interleaved=(MeshConfig(replica=2, data=2, pipe=2), PipelineConfig(schedule="interleaved", microbatches=4, remat="none")),
    eager=(
        MeshConfig(pipe=4, tensor=2),
        PipelineConfig(schedule="eager-1f1b", microbatches=8, idle="compute", layers_per_chunk=(2, 0, 1, 2)),
    ),
    data_and_tensor=(MeshConfig(data=4, tensor=2), PipelineConfig(microbatches=1)),
    gpipe=(MeshConfig(data=2, pipe=2, tensor=2), PipelineConfig(schedule="gpipe", microbatches=2, remat="full")),
)
RESUMED = [("interleaved", "eager"), ("eager", "one_device"), ("one_device", "gpipe"), ("gpipe", "interleaved")]


@functools.cache
def program_of(name: str):
    mesh, pipeline = LAYOUTS[name]
    return build(dataclasses.replace(CONFIG, mesh=mesh, pipeline=pipeline), jax.devices()[: mesh.product])


def batch(step: int) -> dict:
    """The batch of a step: what follows a token is a function of it, so that there is something to learn."""
    rows = reference.batch(ROWS, LENGTH, VOCAB, seed=step)
    return rows | dict(targets=(rows["tokens"] * 5 + 2) % VOCAB)


def fresh(program) -> dict:
    """The state at step 0, the same for every layout."""
    specs, tree = jax.tree.flatten(program.specs)
    shape = lambda s: (program.layout.layers,) * s.stacked + s.shape
    params = [np.asarray(s.init(jax.random.key(i), shape(s))) for i, s in enumerate(specs)]
    zero = jax.device_put(np.int32(0), program.shardings["step"])  # elsewhere, the step would be compiled twice
    return dict(reference.place(program, tree.unflatten(params)), step=zero, skipped=zero + 0)


def train(program, state: dict, start: int, stop: int) -> tuple[dict, list[dict[str, float]]]:
    log = []
    for step in range(start, stop):
        state, metrics = program.train_step(state, program.put(batch(step)))
        log.append(jax.tree.map(float, metrics))
    return state, log


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def run(folder):
    """name -> the 30 metrics of an uninterrupted run, which leaves a checkpoint of step 12 in folder/name."""

    @functools.cache
    def uninterrupted(name):
        program = program_of(name)
        state, log = train(program, fresh(program), 0, STOP)
        checkpoints = Checkpoints(folder / name, keep=1)
        checkpoints.save(STOP, state, program.stored(), {})
        _, rest = train(program, state, STOP, STEPS)
        checkpoints.close()
        return log + rest

    return uninterrupted


def assert_same_run(want: list[dict], got: list[dict]):
    column = lambda log, name: np.array([line[name] for line in log])
    np.testing.assert_allclose(column(got, "loss"), column(want, "loss"), rtol=0, atol=1e-5)
    np.testing.assert_allclose(column(got, "grad_norm"), column(want, "grad_norm"), rtol=1e-5)
    for name in ("lr", "tokens", "skipped"):
        np.testing.assert_array_equal(column(got, name), column(want, name), err_msg=name)


def test_the_run_learns(run):
    losses = [line["loss"] for line in run("one_device")]
    assert losses[0] == pytest.approx(np.log(VOCAB), abs=0.1)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one_device"])
def test_a_run_does_not_depend_on_its_layout(run, name):
    assert_same_run(run("one_device"), run(name))


@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_a_run_stopped_on_one_layout_goes_on_on_another(run, folder, before, after):
    run(before)
    program = program_of(after)
    checkpoints = Checkpoints(folder / before, keep=1)
    assert checkpoints.latest() == STOP
    state = checkpoints.restore(STOP, program.abstract_state(), program.stored())
    checkpoints.close()
    assert int(state["step"]) == STOP
    assert_same_run(run("one_device")[STOP:], train(program, state, STOP, STEPS)[1])
