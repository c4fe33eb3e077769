"""Training, stopping and going on, evaluating and generating, on real text."""

import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from llm import signals
from llm.evaluate import evaluate
from llm.generate import generate
from llm.metrics import METRICS, Metrics, finite, keep_until, read_jsonl
from llm.sampling import Sampling
from llm.train import train
from llm.workdir import check_resume, load_config
from parallel.errors import UserError
from tests.llm.runs import records, small

ROOT = Path(__file__).resolve().parents[2]
KEYS = ["step", "loss", "lr", "grad_norm", "tokens", "step_time_s", "tokens_per_s", "mfu", "skipped", "epoch"]
LAYOUT = dict(mesh__pipe=2, mesh__data=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run: 12 steps on pipe 2 x data 2."""
    workdir = tmp_path_factory.mktemp("run")
    result = train(small(**LAYOUT, train__samples_every=12), workdir)
    assert result["step"] == 12 and result["stopped"] is None and result["step_time_s"] > 0
    return workdir


def stop_after(monkeypatch, step: int, number: int = signal.SIGTERM):
    """Send this process a signal when a step's metrics are written."""
    write = Metrics.step

    def interrupt(self, record):
        write(self, record)
        if record["step"] == step:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    monkeypatch.setattr(Metrics, "step", interrupt)


@pytest.mark.smoke
def test_metrics_have_the_promised_keys(run):
    lines = read_jsonl(run / METRICS)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert all(list(line) == KEYS for line in steps)
    assert [line for line in lines if "eval_loss" in line] == [lines[6], lines[13]]
    assert all(line["mfu"] is None and line["skipped"] == 0 for line in steps)
    assert all(0 < line["tokens"] <= 8 * 32 and isinstance(line["tokens"], int) for line in steps)
    assert steps[-1]["loss"] < steps[0]["loss"] < 1.05 * math.log(384)
    assert steps[0]["lr"] == pytest.approx(0.003 / 5) and steps[4]["lr"] == pytest.approx(0.003)
    assert steps[-1]["lr"] == pytest.approx(0.0003)
    assert list((run / "tensorboard").glob("events*"))
    assert [sample["step"] for sample in read_jsonl(run / "samples.jsonl")] == [12]
    assert load_config(run) == small(**LAYOUT, train__samples_every=12).validate()


@pytest.mark.smoke
def test_a_finished_run_says_so(run, capsys):
    before = (run / METRICS).read_text()
    assert train(small(**LAYOUT), run)["step"] == 12
    assert "finished" in capsys.readouterr().out
    assert (run / METRICS).read_text() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(model__layers=6), "model.layers was 4 and is now 6"),
        (dict(model__width=64), "model.ffn"),
        (dict(optimizer__name="sgd"), "optimizer.name"),
        (dict(data__held_out="2"), "data.held_out"),
    ],
)
def test_another_model_in_the_same_folder_is_refused(run, changes, words):
    with pytest.raises(UserError) as error:
        train(small(**LAYOUT, **changes), run)
    assert words in str(error.value)


def test_stopped_and_resumed_is_uninterrupted(run, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as context:
        stop_after(context, 7)
        result = train(small(**LAYOUT), tmp_path)
    assert (result["step"], result["stopped"]) == (8, "SIGTERM")  # the metrics of 7 are read while 8 runs
    with open(tmp_path / METRICS, "a") as file:  # lines after the checkpoint, as a killed run leaves them; the last torn
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')
    assert train(small(**LAYOUT, optimizer__lr="3e-3", checkpoint__every=3), tmp_path)["step"] == 12
    assert "resuming from step 8" in capsys.readouterr().out
    assert records(tmp_path) == records(run)


def test_a_stop_at_an_evaluation_neither_loses_nor_doubles_it(run, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        stop_after(context, 6, signal.SIGINT)
        assert train(small(**LAYOUT), tmp_path)["stopped"] == "SIGINT"
    lines = [line for line in read_jsonl(tmp_path / METRICS) if "eval_loss" not in line]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    train(small(**LAYOUT), tmp_path)
    assert records(tmp_path) == records(run)


@pytest.mark.smoke
def test_a_change_of_what_is_trained_is_told_and_a_layout_is_not(run):
    changed = small(mesh__pipe=4, pipeline__remat="full", zero=0, optimizer__lr=0.001, train__steps=20, model__dropout=0)
    assert sorted(check_resume(run, changed)) == [
        "model.dropout was 0.1 and is now 0.0",
        "optimizer.lr was 0.003 and is now 0.001",
        "train.steps was 12 and is now 20",
    ]


def test_stopped_on_one_layout_and_resumed_on_another(run, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        stop_after(context, 7)
        train(small(mesh__pipe=4, mesh__data=2), tmp_path)
    train(small(mesh__pipe=2, mesh__tensor=2, pipeline__schedule="1f1b"), tmp_path)
    for a, b in itertools.zip_longest(records(run), records(tmp_path)):
        assert a.keys() == b.keys() and a["step"] == b["step"]
        for name in a.keys() - {"step", "mfu"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5), (a["step"], name)


@pytest.mark.smoke
def test_evaluation_scores_every_document_once_in_any_layout_and_batch(run):
    first = evaluate(run)
    assert list(first) == [
        "step", "documents", "tokens", "bytes", "loss", "perplexity", "bits_per_byte",
        "unigram_perplexity", "bigram_perplexity",
    ]  # fmt: skip
    assert first["step"] == 12 and first["documents"] == 1
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    assert first["bits_per_byte"] == pytest.approx(first["loss"] * first["tokens"] / math.log(2) / first["bytes"])
    last = [record["eval_loss"] for record in read_jsonl(run / METRICS) if "eval_loss" in record][-1]
    assert first["loss"] == pytest.approx(last, rel=1e-6)
    # windows are cut by batch.length, so only the number of rows and the layout may differ
    other = evaluate(run, config=small(mesh__pipe=4, batch__rows=3, pipeline__microbatches=3))
    assert other["tokens"] == first["tokens"] and other["loss"] == pytest.approx(first["loss"], rel=1e-6)


def test_evaluation_of_other_text_and_of_a_step_that_is_not_there(run):
    other = evaluate(run, config=small(data__paths="llm/data/text/198[0-3]*.txt"))
    assert other["bytes"] != evaluate(run)["bytes"]
    with pytest.raises(UserError, match=r"--step=11: .* 10, 12"):
        evaluate(run, step=11)


@pytest.mark.smoke
def test_generation_does_not_depend_on_the_neighbours(run):
    prompts = ["We", "The Congress of the United States", "My fellow Americans, this year"]
    greedy = Sampling(temperature=0, max_tokens=6)
    together = generate(run, prompts, greedy)
    assert [result["prompt"] for result in together] == prompts
    alone = [generate(run, [prompt], greedy, config=small(mesh__pipe=4))[0] for prompt in prompts[:2]]
    assert together[:2] == alone
    assert all(len(result["token_ids"]) <= 6 for result in together)


def test_generation_goes_on_past_the_training_row_and_refuses_an_empty_prompt(run):
    result = generate(run, ["The state of the Union"], Sampling(temperature=0.9, max_tokens=40, seed=3))
    assert result == generate(run, ["The state of the Union"], Sampling(temperature=0.9, max_tokens=40, seed=3))
    assert len(result[0]["token_ids"]) <= 40
    with pytest.raises(UserError, match="empty"):
        generate(run, ["a", ""])


def test_a_profile_and_another_sink(tmp_path, monkeypatch):
    logged = []
    sink = types.ModuleType("wandb")
    sink.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    sink.init = lambda **options: logged.append(options) or sink
    sink.log = lambda values, step: logged.append((step, values))
    sink.finish = lambda: logged.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", sink)
    train(small(train__steps=2, wandb="mine", profile="2:2", evaluate__every=0), tmp_path)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    start, *steps, finish = logged
    assert start["project"] == "mine" and start["id"] == (tmp_path / "wandb_id").read_text()
    assert [step for step, _ in steps] == [1, 2] and finish == "finish"
    assert {"loss", "lr", "tokens_per_s"} <= steps[0][1].keys() and "mfu" not in steps[0][1]


@pytest.mark.smoke
def test_a_sink_that_is_not_installed_is_named(tmp_path):
    if importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    with pytest.raises(UserError, match="pip install wandb"):
        train(small(wandb="mine"), tmp_path)


def test_what_could_only_fail_later_is_refused_at_the_start(tmp_path):
    with pytest.raises(UserError, match="held_out"):
        train(small(data__held_out="", evaluate__every=5), tmp_path)
    with pytest.raises(UserError, match=r"batch\.length=3000000"):
        train(small(batch__length=3000000), tmp_path)


@pytest.mark.smoke
def test_metrics_lines_after_the_resumed_step_are_dropped(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 1}\n{"step": 3}\n{"st')
    assert keep_until(path, 2) == 2
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 2]
    assert path.read_text().count("\n") == 3
    assert [finite(value) for value in (math.nan, math.inf, 1.5, 2, None)] == [None, None, 1.5, 2, None]


def test_commands_as_processes(run):
    flags = ["--workdir", str(run), "--json"]

    def call(*arguments):
        command = [sys.executable, "main.py", *arguments, *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    scored = call("evaluate", "--config.mesh.data=1", "--step=10")
    assert scored.returncode == 0 and json.loads(scored.stdout)["step"] == 10, scored.stderr
    written = call("generate", "--prompt=We", "--max_tokens=3", "--temperature=0")
    assert json.loads(written.stdout) == generate(run, ["We"], Sampling(temperature=0, max_tokens=3))
    finished = call("train", "--config.mesh.pipe=4")
    assert finished.returncode == 0 and json.loads(finished.stdout)["step"] == 12


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, time\nfrom llm.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(0.5)\n    print(stop.requested, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stdout) == (128 + signal.SIGINT, "SIGTERM\n")


def test_a_signal_that_comes_twice_at_once_is_one_request():
    code = (
        "import os, signal, time\nfrom llm.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.05)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.5)\n    print(stop.requested)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stdout) == (0, "SIGINT\n")


def test_handlers_are_restored():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before and stop.requested is None
