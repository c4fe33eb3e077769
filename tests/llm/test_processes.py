"""Several real processes over Gloo do what one does: a step, checkpoints, training, stopping and going on."""

import itertools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import reference

from llm.metrics import METRICS, read_jsonl
from llm.train import train
from tests import worker
from tests.jobs import job, running
from tests.llm.runs import SMALL, records, small

WORKER = "tests/worker.py"


def results(folder: Path, task: str, count: int) -> list[dict]:
    return [json.loads((folder / f"{task}.{count}.{i}.json").read_text()) for i in range(count)]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """Checkpoints of 1, 2 and 4 processes in 12 layouts, each read by 2 and by 4 in another layout; a step in 2."""
    folder = tmp_path_factory.mktemp("matrix")
    worker.save(folder)
    jobs = [job(count, "matrix", str(folder), "8", program=WORKER) for count in (2, 4)]
    with running([command for commands in jobs for command in commands], folder / "logs") as children:
        ended = children.wait()
        assert [process.code for process in ended] == [0] * 6, children.output()
    return folder


def test_two_processes_take_the_step_of_one(matrix):
    one = worker.parity(matrix)
    two = results(matrix, "matrix", 2)
    whole, parts = (dict(np.load(matrix / f"parity.{n}.npz")) for n in (1, 2))
    assert max(reference.difference(whole, parts).values()) < 1e-5
    assert [process["metrics"] for process in two] == pytest.approx([one["metrics"]] * 2, rel=1e-6)
    assert one["stages"] == [0, 1] and [process["stages"] for process in two] == [[0], [1]]  # none has the whole model


def test_checkpoints_of_any_number_of_processes_are_read_by_any(matrix):
    one = worker.restore(matrix)["equal"]
    for count in (2, 4):
        assert sum(process["equal"] for process in results(matrix, "matrix", count)) == one > 100


@pytest.mark.skipif(not worker.Memory.known(), reason="the system does not tell the peak of resident memory anew")
def test_no_process_holds_the_whole_model(tmp_path):
    for count in (1, 2):
        with running(job(count, "memory", str(tmp_path), "8", program=WORKER), tmp_path / f"logs{count}") as children:
            assert [process.code for process in children.wait()] == [0] * count, children.output()
    (one,), two = (results(tmp_path, "memory", count) for count in (1, 2))
    for process in two:
        assert process["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert process["init"] < one["whole"], (process, one)
        assert all(process[phase] < 0.75 * one[phase] for phase in ("init", "save", "restore", "step")), (process, one)


CHANGES = {"mesh.data": 4, "optimizer.decay": "constant", "evaluate.every": 4}  # the rows go over both processes


def test_training_stops_together_goes_on_and_ends_together(tmp_path):
    workdir, steps = tmp_path / "run", lambda: [line["step"] for line in read_jsonl(workdir / METRICS) if "loss" in line]
    options = [f"--config.{name}={value}" for name, value in {**SMALL, **CHANGES, "train.steps": 100000}.items()]
    command = job(2, "train", f"--config={tmp_path / 'config.py'}", f"--workdir={workdir}", "--json", *options)
    (tmp_path / "config.py").write_text("from llm.config import Config\n\nget_config = Config\n")

    with running(command, tmp_path / "stopped") as children:
        children.wait_until(lambda: len(steps()) >= 3)
        children.signal(signal.SIGUSR1, process=1)
        first, second = children.wait()
    assert (first.code, second.code) == (75, 75), children.output()
    result = json.loads(first.out)
    assert result["stopped"] == "SIGUSR1" and second.out == ""
    stopped = result["step"]
    assert steps() == list(range(1, stopped + 1)) and (workdir / "checkpoints" / str(stopped)).is_dir()

    with running(command, tmp_path / "killed") as children:
        children.wait_until(lambda: len(steps()) >= stopped + 3)
        children.signal(signal.SIGKILL, process=1)
        first, second = children.wait()
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    assert "error: process 1 of 2" in first.err and "has ended without a word" in first.err
    assert "Traceback" not in first.err and f"resuming from step {stopped}" in first.err

    changes = {name.replace(".", "__"): value for name, value in CHANGES.items()}
    ended = train(small(**changes, train__steps=len(steps()) + 3), workdir)
    whole = train(small(**changes, train__steps=ended["step"]), tmp_path / "whole")
    assert ended["step"] == whole["step"] and ended["step"] > stopped + 3
    for ours, theirs in itertools.zip_longest(records(workdir), records(tmp_path / "whole")):
        assert close(ours, theirs), (ours, theirs)


def close(a, b, rel=1e-5) -> bool:
    """Whether two values of JSON are the same but for the rounding of fp32, which in a gradient's norm grows over the steps."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[n], b[n], 1e-4 if n == "grad_norm" else rel) for n in a)
    return a == pytest.approx(b, rel=rel) if isinstance(a, float) else a == b
