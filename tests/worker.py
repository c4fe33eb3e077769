"""One process of a job that tests start: python tests/worker.py TASK FOLDER DEVICES [--coordinator, --processes, --process].

DEVICES is the number of virtual devices of the whole job. A task is a function below; what it returns goes as JSON to
FOLDER/TASK.N.I.json."""

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path

from parallel import distributed

LAYOUTS = {  # of 8 devices, with 7 layers, which none of them divides; a state of one is read into the next of its optimiser
    "muon": [
        dict(pipe=8),
        dict(pipe=4, chunks=2, tensor=2),
        dict(pipe=2, chunks=3, data=4, zero=1),
        dict(pipe=2, chunks=2, placement="v", tensor=4),
        dict(pipe=2, chunks=2, per_chunk=(3, 0, 1, 3), data=4, zero=1),
        dict(replica=2, data=2, tensor=2, zero=1),
    ],
    "adamw": [
        dict(data=8, zero=1),
        dict(pipe=4, data=2),
        dict(replica=2, pipe=2, tensor=2),
        dict(pipe=2, data=2, tensor=2, zero=1),
        dict(replica=2, data=4),
        dict(pipe=4, chunks=2, placement="v", data=2, zero=1),
    ],
}


def parity(folder: Path) -> dict:
    """A step on pipe 2 x data 2 x tensor 2: loss, gradient norm, gradients and parameters after SGD in parity.N.npz."""
    import jax
    import numpy as np
    import reference
    from jax.experimental import multihost_utils
    from parity import LENGTH, ROWS, VOCAB, compiled, program_of, random_params
    from parity_cases import Case

    case = Case("interleaved/2", "split", "pipe2 data2 tensor2", "4p", "none", "skip", "uneven", "llama", "tied", "zero1")
    program = program_of(case)
    rows, own = reference.batch(ROWS, LENGTH, VOCAB), program.own_rows
    state = dict(reference.place(program, random_params(program)), step=np.int32(0), skipped=np.int32(0))
    batch = program.put({name: a[own] for name, a in rows.items()}, own)
    with jax.set_mesh(program.mesh):
        grads, (state, metrics) = compiled(program)(state, batch, program.device_table)
    whole = lambda tree: jax.tree.map(lambda a: multihost_utils.process_allgather(a, tiled=True), tree)
    found = [reference.canonical(program, whole(tree)) for tree in (grads, state["params"])]
    found += [whole(metrics["loss"]), whole(metrics["grad_norm"])]
    stages = {int(stage) for stage in np.argwhere(np.vectorize(is_own)(program.mesh.devices))[:, 2]}
    if distributed.is_first():
        np.savez(folder / f"parity.{distributed.count()}.npz", *jax.tree.leaves(found))
    return dict(stages=sorted(stages), rows=own.tolist(), metrics=float(metrics["loss"]))


def is_own(device) -> bool:
    import jax

    return device.process_index == jax.process_index()


def save(folder: Path) -> dict:
    """A state in each of LAYOUTS, saved to FOLDER/N/OPTIMISER.LAYOUT."""
    from llm.checkpoint import Checkpoints
    from tests.llm.states import Setup

    for optimizer, layouts in LAYOUTS.items():
        for number, layout in enumerate(layouts):
            setup = Setup(**layout, optimizer=optimizer)
            checkpoints = Checkpoints(folder / str(distributed.count()) / f"{optimizer}.{number}", keep=1)
            checkpoints.save(3, setup.state(), setup.stored, layout)
            checkpoints.close()
    if distributed.is_first():
        (folder / f"{distributed.count()}.whole").touch()
    return {}


def restore(folder: Path) -> dict:
    """Every state of 1, 2 and 4 processes in the next of LAYOUTS, compared with what was saved: how many shards were equal."""
    import jax
    import numpy as np

    from llm.checkpoint import Checkpoints
    from tests.llm.states import Setup

    equal = 0
    for writers in (1, 2, 4):
        while not (folder / f"{writers}.whole").exists():  # the test has a time limit
            time.sleep(0.2)
        for optimizer, layouts in LAYOUTS.items():
            for number, layout in enumerate(layouts):
                setup = Setup(**layout, optimizer=optimizer)
                saved = folder / str(writers) / f"{optimizer}.{(number + 1) % len(layouts)}"
                state = Checkpoints(saved, keep=1).restore(3, setup.abstract, setup.stored)
                for leaf, want in zip(jax.tree.leaves(state), jax.tree.leaves(setup.expected()), strict=True):
                    for shard in leaf.addressable_shards:
                        np.testing.assert_array_equal(shard.data, want[shard.index])
                        equal += 1
    return dict(equal=equal)


def matrix(folder: Path) -> dict:
    """`save`, then `restore`, parity in two processes: one start of the processes for all."""
    save(folder)
    return restore(folder) | (parity(folder) if distributed.count() == 2 else {})


def memory(folder: Path) -> dict:
    """Bytes that this process had at most, more than before, to initialise, save, restore and step a model.

    All of it is done once before, so that nothing is compiled any more."""
    import jax
    import numpy as np
    import reference

    from llm.checkpoint import Checkpoints
    from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
    from llm.step import build

    config = Config(
        model=ModelConfig(layers=4, width=512, heads=8, vocab=16384, tied=False),
        mesh=MeshConfig(pipe=2, data=2, tensor=2),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2),
        batch=BatchConfig(rows=4, length=8),
        optimizer=OptimizerConfig(name="sgd"),
    )
    program = build(config)
    batch = {name: a[program.own_rows] for name, a in reference.batch(4, 8, 16384).items()}
    for turn in range(2):
        measured, most = Memory(), {}
        state = jax.block_until_ready(program.init())
        most["whole"] = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        most["init"] = measured.most()
        checkpoints = Checkpoints(folder / f"memory.{distributed.count()}.{turn}", keep=1)
        checkpoints.save(1, state, program.stored(), {})
        checkpoints.wait()
        most["save"] = measured.most()
        state = None
        measured.trim()
        state = jax.block_until_ready(checkpoints.restore(1, program.abstract_state(), program.stored()))
        checkpoints.close()
        most["restore"] = measured.most()
        measured.trim()
        state, metrics = jax.block_until_ready(program.train_step(state, program.put(batch, program.own_rows)))
        most["step"] = measured.most()
        most["loss"] = float(np.asarray(metrics["loss"]))
        state = metrics = None
    return most


class Memory:
    """Resident memory from now on, on Linux."""

    @staticmethod
    def known() -> bool:
        status = Path("/proc/self/status")
        return os.access("/proc/self/clear_refs", os.W_OK) and status.is_file() and "VmHWM" in status.read_text()

    def __init__(self):
        self.trim()
        self.before = self._read("VmRSS")

    def trim(self) -> None:
        """Give back what is free, and let the peak start afresh."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def most(self) -> int:
        return self._read("VmHWM") - self.before

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def main(task: str, folder: Path, devices: int, flags: list[str]) -> None:
    values = dict(flag.removeprefix("--").split("=") for flag in flags)
    job = distributed.find(values.get("coordinator", ""), int(values.get("processes", 0)), int(values.get("process", -1)))
    count = devices // (job.processes if job else 1)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    if job:
        distributed.join(job)
    with distributed.guard():
        result = globals()[task](folder)
    process = job.process if job else 0
    (folder / f"{task}.{distributed.count()}.{process}.json").write_text(json.dumps(result))
    distributed.leave(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
