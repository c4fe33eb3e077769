"""A checkpoint read by another layout: the same parameters, the same optimiser, the same next loss, and little memory."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import reference

from llm.checkpoint import Checkpoints
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from llm.step import build

ROOT = Path(__file__).resolve().parents[2]
ROWS, LENGTH, VOCAB = 8, 8, 37  # padded wherever the vocabulary is split
MODELS = {
    "tied, muon": (ModelConfig(layers=5, width=16, heads=4, kv_heads=2, ffn=24, vocab=VOCAB), OptimizerConfig(name="muon")),
    "untied, adamw": (
        ModelConfig(layers=3, width=16, heads=4, ffn=16, vocab=VOCAB, tied=False, mlp="gelu", bias=True, norm="layer"),
        OptimizerConfig(name="adamw"),
    ),
}
LAYOUTS = {  # mesh, pipeline and ZeRO; 5 and 3 layers divide evenly by none of the pipelines
    "one": ({}, {}, 0),
    "pipe 2": (dict(pipe=2), dict(chunks=1, schedule="gpipe"), 0),
    "pipe 2, two chunks, data 2": (dict(pipe=2, data=2), dict(chunks=2), 1),
    "pipe 2, V": (dict(pipe=2), dict(schedule="zb-v"), 0),
    "pipe 4, tensor 2": (dict(pipe=4, tensor=2), dict(chunks=1), 0),
    "by hand": (dict(pipe=2, replica=2), dict(chunks=2, layers_per_chunk=True), 1),
    "data 4, tensor 2": (dict(data=4, tensor=2), dict(), 1),
}


def layers_by_hand(layers: int) -> tuple[int, ...]:
    return (layers - 1, 0, 1, 0)


def program_of(model: str, layout: str):
    mesh, pipeline, zero = LAYOUTS[layout]
    architecture, optimizer = MODELS[model]
    if pipeline.get("layers_per_chunk"):
        pipeline = pipeline | dict(layers_per_chunk=layers_by_hand(architecture.layers))
    config = Config(
        model=architecture,
        mesh=MeshConfig(**mesh),
        pipeline=PipelineConfig(**pipeline),
        batch=BatchConfig(rows=ROWS, length=LENGTH),
        optimizer=optimizer,
        zero=zero,
    )
    return build(config, jax.devices()[: config.mesh.product])


def filled(program):
    """A state in which every number is another one, by its canonical place alone."""
    stored, tree = jax.tree.flatten(program.stored(), is_leaf=lambda x: hasattr(x, "index_CPL"))
    leaves = jax.tree.leaves(program.abstract_state())
    out = []
    for number, (form, leaf) in enumerate(zip(stored, leaves)):
        shift = np.arange(np.prod(form.shape, dtype=int)).reshape(form.shape) % 89
        value = (0.1 * np.cos(number + shift)).astype(leaf.dtype) if leaf.dtype == np.float32 else np.int32(number)
        full = np.zeros(leaf.shape, leaf.dtype)
        if form.index_CPL is None:
            full[tuple(slice(0, n) for n in form.shape)] = value
        else:
            inner = tuple(slice(0, n) for n in form.shape[1:])
            for where in np.argwhere(form.index_CPL >= 0):
                full[(*where, *inner)] = value[form.index_CPL[tuple(where)]]
        out.append(jax.device_put(full, leaf.sharding))
    return tree.unflatten(out)


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_reads_every_other(model, tmp_path):
    """14 layouts in all: what each has saved, every other one of its model restores bit by bit, and counts the same loss."""
    programs = {name: program_of(model, name) for name in LAYOUTS}
    states = {name: filled(program) for name, program in programs.items()}
    for name, program in programs.items():
        checkpoints = Checkpoints(tmp_path / name, 1)
        checkpoints.save(3, states[name], program.stored(), {})
        checkpoints.close()
    for reader, program in programs.items():
        for writer in programs:
            state = Checkpoints(tmp_path / writer, 1).restore(3, program.abstract_state(), program.stored())
            jax.tree.map(np.testing.assert_array_equal, state, states[reader])
    batch, losses = reference.batch(ROWS, LENGTH, VOCAB, seed=1), {}
    for writer, (reader, program) in zip([*programs][1:] + [*programs][:1], programs.items()):
        state = Checkpoints(tmp_path / writer, 1).restore(3, program.abstract_state(), program.stored())
        scores = program.eval_step(state["params"], program.put(batch))
        losses[reader] = float(np.asarray(scores["nll"]).sum() / np.asarray(scores["tokens"]).sum())
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses


PEAK = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from llm import arrays
from llm.checkpoint import Checkpoints
from parallel.mesh import make_mesh
from parallel.sharding import Stored
LAYERS, ROWS, ARRAYS = 32, 1024, 2
form = Stored((LAYERS, ROWS, 1024), np.arange(LAYERS).reshape(1, 4, LAYERS // 4))
sharding = NamedSharding(make_mesh({"pipe": 4, "tensor": 2}), P(None, "pipe", None, None, "tensor"))
shape = (1, 4, LAYERS // 4, ROWS, 1024)
abstract = {f"w{i}": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for i in range(ARRAYS)}
stored = {name: form for name in abstract}
folder = sys.argv[1]
make = jax.jit(lambda i: jnp.full(shape, i, jnp.float32), out_shardings=sharding)
checkpoints = Checkpoints(folder, 1)
checkpoints.save(1, {name: make(i) for i, name in enumerate(abstract)}, stored, {})
checkpoints.close()
del checkpoints
arrays.PIECE = arrays.IN_FLIGHT = 1  # a piece is one layer of this process's part, and one chunk is under way
def memory(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024
jax.block_until_ready(Checkpoints(folder, 1).restore(1, abstract, stored))  # compiles
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
state = jax.block_until_ready(Checkpoints(folder, 1).restore(1, abstract, stored))
assert all(float(leaf[0, 3, -1, -1, -1]) == i for i, leaf in enumerate(state.values()))
own, piece = sum(leaf.nbytes for leaf in state.values()), 4 * ROWS * 1024 * 4  # one layer for each rank of the pipe
print(json.dumps(dict(own=own, piece=piece, peak=memory("VmHWM") - before)))
"""


def test_restoring_holds_its_own_part_and_one_layer(tmp_path):
    """Peak memory of the process, which has all devices: what the state takes and, of one array at a time, one layer for each
    rank of the pipe, which is held twice because host and devices share the memory here; and as much again for the rest."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of a process cannot be reset here")
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # what is freed goes to the system
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["own"] == 16 * found["piece"]
    assert found["own"] <= found["peak"] < found["own"] + 4 * found["piece"], found  # a whole array would be 8 pieces


def test_the_layouts_differ():
    """So that the matrix is one: no two layouts have their parts in the same places."""
    places = {}
    for name in LAYOUTS:
        program = program_of("tied, muon", name)
        shardings = jax.tree.map(lambda s: str(s.spec), program.shardings)
        places[name] = (program.layout.index_CPL.tolist(), dataclasses.asdict(program.config.mesh), str(shardings))
    assert len({json.dumps(place) for place in places.values()}) == len(LAYOUTS) == 7
