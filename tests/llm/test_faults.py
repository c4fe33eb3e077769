"""What goes wrong in a run: nothing that was saved is lost, the run says what is the matter, and the same command goes on."""

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import llm.train
from llm.checkpoint import Checkpoints, read
from llm.commandline import dispatch
from llm.config import TrainConfig
from llm.data.corpus import open_corpus
from llm.metrics import METRICS, Metrics, TensorBoard, read_jsonl
from llm.step import Program
from llm.train import train
from llm.workdir import CONFIG, locked
from main import COMMANDS
from parallel.errors import UserError
from tests.llm.faults import after, interrupt, tiny
from tests.llm.runs import records

pytestmark = pytest.mark.usefixtures("one_program")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, for others to be like."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert train(tiny(), workdir)["step"] == 12
    return workdir


def snapshot(folder: Path) -> dict:
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


# ------------------------------------------------------------------------------------------- a start that is refused
@pytest.mark.smoke
def test_two_runs_in_one_folder_are_refused(run, tmp_path):
    before = snapshot(run)
    with locked(run), pytest.raises(UserError, match="another process works in"):
        train(tiny(train__steps=15), run)
    del before[run / ".lock"]
    assert {path: entry for path, entry in snapshot(run).items() if path.name != ".lock"} == before


def test_damaged_checkpoints_are_refused_and_left_alone(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    workdir = shutil.copytree(run, tmp_path / "run")
    for path in (workdir / "checkpoints").rglob("manifest.json"):
        path.write_text(path.read_text()[:-20])
    before = snapshot(workdir)
    assert dispatch(COMMANDS, ["train", f"--workdir={workdir}", "--config.train.steps=20"]) == 4
    assert "can be read; nothing was changed" in capsys.readouterr().err.splitlines()[-1]
    assert {p: e for p, e in snapshot(workdir).items() if p.name != ".lock"} == {
        p: e for p, e in before.items() if p.name != ".lock"
    }
    assert dispatch(COMMANDS, ["evaluate", f"--workdir={workdir}"]) == 4


def test_changed_text_is_refused_and_the_configuration_stays(tmp_path):
    text, config = tmp_path / "text.txt", tiny(data__paths=tmp_path / "text.txt", data__held_out="", evaluate__every=0)
    text.write_text((ROOT / "llm/data/text/1970_richard_nixon.txt").read_text())
    train(config, tmp_path / "run")
    Checkpoints(tmp_path / "run/checkpoints", 9).delete(12)
    text.write_text("Another text. " * 2000)
    before = (tmp_path / "run" / CONFIG).read_bytes()
    with pytest.raises(UserError, match="has changed since the run"):
        train(dataclasses.replace(config, train=TrainConfig(steps=12, watchdog=99)), tmp_path / "run")
    assert (tmp_path / "run" / CONFIG).read_bytes() == before


@pytest.mark.smoke
def test_a_folder_that_cannot_be_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    (tmp_path / "file").write_text("a file")
    for workdir in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing/run"):
        arguments = ["train", f"--workdir={workdir}", f"--config={ROOT}/experiments/configs/demo.py"]
        assert dispatch(COMMANDS, [*arguments, "--config.mesh.pipe=1", "--config.mesh.data=1"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: --workdir={workdir} cannot be made a folder") and err.count("\n") == 1


# ------------------------------------------------------------------------------------------- going on
def test_odd_lines_of_metrics_are_left_out(run, tmp_path):
    workdir = shutil.copytree(run, tmp_path / "run")
    lines = (workdir / METRICS).read_bytes().splitlines(keepends=True)
    odd = [b"\xff\xfe\x00\x01", b"[1]", b"3", b'{"loss": 2}', b'{"step": "x"}', b'{"step": null}', b"[" * 9999]
    (workdir / METRICS).write_bytes(b"".join(line + bad + b"\n" for line, bad in zip(lines, odd * 9)))
    for step in (9, 12):
        Checkpoints(workdir / "checkpoints", 9).delete(step)
    train(tiny(), workdir)
    assert records(workdir) == records(run)
    (workdir / METRICS).write_bytes(os.urandom(9999))
    assert train(tiny(), workdir)["loss"] is None  # it is finished


@pytest.mark.smoke
def test_a_run_goes_on_without_tensorboard(tmp_path, capsys):
    """Its files are the one thing that may be lost when a disk is full."""
    events = TensorBoard(tmp_path / "tensorboard", 0)
    events.scalars(1, {"loss": 2.0})
    events.writer._py_recordio_writer._writer.close()
    events.writer._py_recordio_writer._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for step in range(2, 50):
        events.scalars(step, {"loss": 2.0})
    events.text(50, "sample", "text")
    events.close()
    assert capsys.readouterr().err.count("note: tensorboard's files are not written any more") == 1


@pytest.mark.parametrize(
    ("place", "name", "times", "number"),
    [
        (llm.train, "open_corpus", 1, signal.SIGTERM),  # before anything was trained
        (Program, "train_step", 1, signal.SIGUSR1),
        (llm.train, "held_out_loss", 1, signal.SIGTERM),
        (Checkpoints, "save", 2, signal.SIGINT),
        (Checkpoints, "wait", 12, signal.SIGTERM),  # the last save, of a finished run
    ],
)
def test_a_signal_at_any_time_stops_after_saving(place, name, times, number, run, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        after(context, place, name, lambda: interrupt(number), times)
        result = train(tiny(), tmp_path)
    if result["step"] < 12:
        assert result["stopped"] == signal.Signals(number).name
    assert Checkpoints(tmp_path / "checkpoints", 9).latest() == (result["step"] or None)
    assert train(tiny(), tmp_path)["stopped"] is None
    assert records(tmp_path) == records(run)


def test_stopped_before_the_first_step_says_that_nothing_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    after(monkeypatch, llm.train, "open_corpus", lambda: interrupt(signal.SIGUSR1))
    (tmp_path / "config.py").write_text("from tests.llm.faults import tiny as get_config\n")
    command = ["train", f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/run"]
    assert dispatch(COMMANDS, command) == 75
    assert "stopped before the first step: nothing to save" in capsys.readouterr().out
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("step", [6, 12])
def test_a_failed_save_ends_the_run_and_loses_nothing_that_was_saved(step, run, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        whole = llm.checkpoint.write_shards

        def full(folder, *args):
            if folder.parent.name.startswith(f"{step}."):
                raise OSError(28, "No space left on device")
            whole(folder, *args)

        context.setattr(llm.checkpoint, "write_shards", full)
        with pytest.raises(OSError, match=rf"saving step {step} .*the steps before it are whole.*No space left"):
            train(tiny(), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints", 9).latest() == step - 3
    train(tiny(), tmp_path)
    assert records(tmp_path) == records(run)


def test_interrupted_again_and_again_is_uninterrupted(tmp_path, monkeypatch):
    """Bit for bit, over epochs that are shuffled anew, with dropout, warm-up and decay, evaluation and metrics."""
    text, held = tmp_path / "a.txt", tmp_path / "b.txt"
    text.write_text((ROOT / "llm/data/text/1970_richard_nixon.txt").read_text()[:150])
    held.write_text("One more text, which is not trained on.")
    config = tiny(
        data__paths=f"{text},{held}", data__held_out="b.txt", data__tokenizer="", evaluate__every=2, checkpoint__every=2
    )
    train(config, tmp_path / "whole")
    for steps in (1, 2, 3):
        with monkeypatch.context() as context:
            after(context, Metrics, "step", interrupt, steps)
            assert train(config, tmp_path / "parts")["stopped"]
    assert train(config, tmp_path / "parts")["step"] == 12
    lines = records(tmp_path / "whole")
    assert records(tmp_path / "parts") == lines
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6, 8, 10, 12]
    assert max(line["epoch"] for line in lines if "epoch" in line) > 2
    for name in ("params/embed/tokens", "optimizer/adam/nu/embed/tokens", "step"):
        whole, parts = (read(tmp_path / run / "checkpoints", 12, name) for run in ("whole", "parts"))
        np.testing.assert_array_equal(whole, parts)


# ------------------------------------------------------------------------------------------- beginning with another run
def test_a_run_begins_with_the_parameters_of_another(run, tmp_path, monkeypatch, capsys):
    source = shutil.copytree(run, tmp_path / "source")
    config = tiny(init_from=f"{source}:9", optimizer__lr=0, data__paths="llm/data/text/198[0-2]*.txt")
    with monkeypatch.context() as context:
        after(context, Metrics, "step", interrupt, 4)
        assert train(config, tmp_path / "run")["stopped"]
    assert f"starting from the parameters of {source}:9 at step 9" in capsys.readouterr().out
    for name in ("params/embed/tokens", "params/layers/up/kernel"):
        old, new = read(source / "checkpoints", 9, name), read(tmp_path / "run/checkpoints", 5, name)
        np.testing.assert_array_equal(old, new)
    assert (tmp_path / "run/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / METRICS) if "lr" in line] == [1, 2, 3, 4, 5]
    shutil.rmtree(source)
    assert train(config, tmp_path / "run")["step"] == 12  # it has a tokenizer of its own by now


def test_what_a_run_cannot_begin_with_is_refused(run, tmp_path):
    other = open_corpus(tiny(data__paths="llm/data/text/198*.txt").data, 280, tmp_path / "corpus").tokenizer
    other.save(tmp_path / "other.json")
    for changes, words in (
        (dict(init_from=f"{run}:7"), r"--step=7: the checkpoints in .* are of the steps 3, 6, 9, 12"),
        (dict(init_from=f"{tmp_path}/none"), "there is no run in this folder"),
        (dict(init_from=run, model__width=24), "model.width was 16 and is now 24"),
        (dict(init_from=run, data__tokenizer=tmp_path / "other.json"), "another tokenizer"),
    ):
        with pytest.raises(UserError, match=words):
            train(tiny(**changes), tmp_path / "new")
