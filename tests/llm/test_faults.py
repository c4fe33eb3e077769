"""What goes wrong in a run: nothing that was saved is lost, the run says what is the matter, and the same command goes on."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import llm.train
from llm.checkpoint import Checkpoints, read
from llm.commandline import dispatch
from llm.config import CheckpointConfig, EvaluateConfig, TrainConfig
from llm.data.corpus import Corpus, open_corpus
from llm.metrics import METRICS, Metrics, TensorBoard, read_jsonl
from llm.skips import FEWEST, WINDOW, Skips
from llm.step import Program, build
from llm.train import train
from llm.watchdog import FACTOR, HUNG, LEAST, Watchdog
from llm.workdir import CONFIG, locked
from main import COMMANDS
from parallel.errors import CheckError, UserError
from tests.llm.runs import records, small

ROOT = Path(__file__).resolve().parents[2]
TINY = dict(
    model__layers=1, model__width=16, model__vocab=280, pipeline__chunks=1,
    checkpoint__every=3, checkpoint__keep=9, evaluate__every=5, train__steps=12,
)  # fmt: skip


def tiny(**changes):
    return small(**TINY | changes)


@functools.cache
def program_of(config, devices):
    return build(config, list(devices))


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """Runs that differ in nothing that is compiled share a program."""

    def shared(config, devices):
        train = dataclasses.replace(TrainConfig(), steps=config.train.steps)
        same = dict(train=train, checkpoint=CheckpointConfig(), evaluate=EvaluateConfig(), init_from="", data=tiny().data)
        return program_of(dataclasses.replace(config, **same), tuple(devices))

    monkeypatch.setattr(llm.train, "build", shared)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, for others to be like."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert train(tiny(), workdir)["step"] == 12
    return workdir


def snapshot(folder: Path) -> dict:
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


def after(monkeypatch, place, name: str, act, times: int = 1):
    """Let `act` happen when a function has been called for the so-manieth time."""
    whole, calls = getattr(place, name), []

    def wrapped(*args, **options):
        result = whole(*args, **options)
        calls.append(0)
        if len(calls) == times:
            act()
        return result

    monkeypatch.setattr(place, name, wrapped)


def interrupt(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(0.2)


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
    (tmp_path / "config.py").write_text("from tests.llm.test_faults import tiny as get_config\n")
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


# ------------------------------------------------------------------------------------------- updates that are skipped
def poison(monkeypatch, positions, weights=(3e38, -3e38)):
    """Batches whose first two tokens count so much, by default that the loss is not a number."""
    whole = Corpus.batch

    def batch(self, seed, step, *args, **options):
        found = whole(self, seed, step, *args, **options)
        if step in positions:
            found["weights"] = found["weights"].copy()
            found["weights"][0, :2] = weights
        return found

    monkeypatch.setattr(Corpus, "batch", batch)


def moved(monkeypatch, begin, by):
    """The batches of a run that has none of `begin` to `begin + by`."""
    whole = Corpus.batch
    shifted = lambda self, seed, step, *args, **options: whole(self, seed, step + by * (step >= begin), *args, **options)
    monkeypatch.setattr(Corpus, "batch", shifted)


def test_skipped_updates_lead_back_to_a_checkpoint_and_past_their_text(tmp_path, monkeypatch):
    """Updates 8 and 9 are skipped: the run is that of the text without the batches since checkpoint 6."""
    with monkeypatch.context() as context:
        moved(context, 6, 3)
        train(tiny(), tmp_path / "without")
    config = tiny(train__rollback=2)
    with monkeypatch.context() as context:
        poison(context, (7, 8))
        result = train(config, tmp_path / "through")
        assert (result["rollbacks"], result["skipped"], result["step"]) == (1, 2, 12)
        after(context, Metrics, "step", interrupt, 11)  # stopped after the roll-back
        assert 8 <= train(config, tmp_path / "twice")["step"] < 12
        train(config, tmp_path / "twice")
    assert clean(tmp_path / "through") == clean(tmp_path / "without") == clean(tmp_path / "twice")
    assert Checkpoints(tmp_path / "through/checkpoints", 9).meta(12)["position"] == 15


def clean(workdir):
    """Records without what says which text was read, which the shifted run says otherwise."""
    return [{name: value for name, value in record.items() if "epoch" not in name} for record in records(workdir)]


def test_a_run_that_stops_among_skipped_updates_still_goes_back(tmp_path, monkeypatch):
    config = tiny(train__rollback=4)
    poison(monkeypatch, (4, 5, 6, 7))
    train(config, tmp_path / "through")
    for line, step in ((6, 6), (7, 8), (8, 3)):  # among them; before the last is read; when it is, and another under way
        with monkeypatch.context() as context:
            after(context, Metrics, "step", interrupt, line)
            assert train(config, tmp_path / f"stopped{line}")["step"] == step
        train(config, tmp_path / f"stopped{line}")
        assert records(tmp_path / f"stopped{line}") == records(tmp_path / "through")


def test_no_way_back_is_said(tmp_path, monkeypatch):
    poison(monkeypatch, range(99))
    with pytest.raises(CheckError, match=r"the 4 updates until step 4 were skipped.*no checkpoint left to go back to"):
        train(tiny(train__rollback=4), tmp_path / "a")
    with pytest.raises(CheckError, match=r"all 12 updates were skipped.*lower optimizer\.lr"):
        train(tiny(train__rollback=0), tmp_path / "b")
    assert all(line["skipped"] == 1 and line["loss"] is None for line in read_jsonl(tmp_path / "b" / METRICS) if "lr" in line)


def test_each_time_further_back(tmp_path, monkeypatch):
    train(tiny(), tmp_path)
    Checkpoints(tmp_path / "checkpoints", 9).delete(12)
    poison(monkeypatch, range(9, 99))
    with pytest.raises(CheckError, match="no checkpoint left"):
        train(tiny(train__rollback=2), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints", 9).steps() == [3]


def test_a_spike_of_the_gradient_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("llm.skips.FEWEST", 3)
    config = tiny(train__spike=4)
    poison(monkeypatch, (7,), (9000.0, -8999.0))
    result = train(config, tmp_path / "through")
    assert (result["skipped"], result["rollbacks"]) == (1, 0)
    line = next(line for line in read_jsonl(tmp_path / "through" / METRICS) if line["step"] == 8)
    assert line["skipped"] == 1 and line["grad_norm"] > 4 and line["loss"] is not None
    with monkeypatch.context() as context:
        after(context, Metrics, "step", interrupt, 6)
        train(config, tmp_path / "stopped")
    train(config, tmp_path / "stopped")
    assert records(tmp_path / "stopped") == records(tmp_path / "through")


@pytest.mark.smoke
def test_the_limit_of_the_gradient_norm():
    skips = Skips(3.0, 0)
    assert skips.limit(1) == float("inf")
    for step in range(1, 200):
        skips.note(step, float(step), skipped=step % 7 == 0)
        known = range(max(1, step - WINDOW), step)
        assert skips.limit(step + 1) == (3.0 * np.median(known) if len(known) >= FEWEST else float("inf"))
    last = range(199 - WINDOW, 199)
    assert skips.limit(200) == 3.0 * np.median(last)  # of updates until 198: 199 is read while 200 runs
    again = Skips(3.0, 0, json.loads(json.dumps(skips.meta())))
    assert again.limit(200) == skips.limit(200) and again.limit(201) == skips.limit(201)
    skips.note(200, float("nan"), True)
    assert skips.limit(202) == 3.0 * np.median(range(200 - WINDOW, 200))
    assert Skips(0.0, 3).limit(5) is None
    with pytest.raises(UserError, match=r"train\.spike=0\.9 would skip usual updates"):
        tiny(train__spike=0.9).validate()


# ------------------------------------------------------------------------------------------- a step that hangs
HANGS = """
import threading, time
from llm.watchdog import Watchdog
def stuck_here():
    time.sleep(60)
watchdog = Watchdog(0.5)
with watchdog.watch("step"):
    time.sleep(1)  # it compiles
with watchdog.watch("step"):
    pass
threading.Thread(target=stuck_here, daemon=True).start()
with watchdog.watch("step"):
    stuck_here()
"""


@pytest.mark.smoke
def test_the_watchdog_shows_every_stack_and_exits_70():
    result = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.returncode == HUNG == 70
    assert "watchdog: no end of the step" in result.stderr and result.stderr.count("stuck_here") == 2


@pytest.mark.smoke
def test_how_long_work_may_take():
    def limits(seconds, kind="step", durations=()):
        watchdog = Watchdog(0)
        watchdog.seconds = seconds
        watchdog._history[kind].extend(durations)
        watchdog._begun |= {kind} if durations else set()
        return watchdog.limit(kind)

    assert limits(5.0) is None  # the first compiles
    assert limits(5.0, durations=[1.0]) == 5.0 and limits(5.0, "evaluation", [1.0]) == FACTOR
    assert limits(5.0, "evaluation", [0.1]) == 5.0 and limits(0, durations=[1.0]) is None
    assert limits(-1, durations=[1.0]) == LEAST and limits(-1, durations=[100.0, 100.0, 1.0]) == 100 * FACTOR
    assert limits(-1) is None


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
