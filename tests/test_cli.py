"""The command line: help, errors as one sentence with an exit code, JSON alone on stdout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm import overrides
from llm.commandline import Command, Flag, dispatch
from llm.config import Config
from llm.devices import request_devices
from main import COMMANDS
from parallel.errors import CheckError, UserError

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[1]
DEMO = f"--config={ROOT}/experiments/configs/demo.py"


@pytest.fixture(autouse=True)
def same_flags(monkeypatch):
    """The commands write XLA_FLAGS for the process that they run in; here they must not."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


def refused(capsys, *arguments: str) -> str:
    """The one sentence with which a command line is refused."""
    assert dispatch(COMMANDS, arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_help_lists_commands_and_every_option(capsys):
    assert dispatch(COMMANDS, ["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert dispatch(COMMANDS, ["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "optimizer.lr=0.001" in text and "model.tied=true" in text and "adamw | muon | sgd" in text
    assert "--workdir=FOLDER" in text and "usage: python main.py train --config=FILE --workdir=FOLDER" in text
    assert max(map(len, text.splitlines())) <= 100
    assert dispatch(COMMANDS, ["generate", "--help"]) == 0
    assert "--temperature=T" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which command?"),
        (["trian"], "did you mean train?"),
        (["xyz"], "train, evaluate, "),
        (["train", "--workdri=x"], "did you mean --workdir?"),
        (["generate", "--max-tokens=3"], "did you mean --max_tokens?"),
        (["train"], "needs --workdir=FOLDER"),
        (["train", "--workdir"], "--workdir"),
        (["train", "--workdir=nowhere"], "needs --config=FILE"),
        (["train", "--workdir=x", "more", DEMO], "'more'"),
        (["train", "--workdir=x", DEMO, "--config.optimiser.lr=1"], "did you mean optimizer.lr?"),
        (["train", "--workdir=x", DEMO, "--config.optimizer.lr=fast"], "optimizer.lr=fast: expected a number"),
        (["train", "--workdir=x", DEMO, "--config.optimizer.lr"], "--config.optimizer.lr=VALUE"),
        (["train", "--workdir=x", DEMO, "--config.=3"], "--config.=3: which option?"),
        (["train", "--workdir=x", DEMO, "--config.pipeline.remat=ful"], "did you mean full?"),
        (["train", "--workdir=x", DEMO, "--config.mesh.tensor=3"], "tensor sizes that fit are 1, 2, 4"),
        (["train", "--workdir=x", DEMO, "--devices=4"], "needs 8 devices and there are 4"),
        (["train", "--workdir=x", DEMO, "--devices=-4"], "positive"),
        (["train", "--workdir=x", "--config=nothing.py"], "there is no such file"),
        (["evaluate", "--workdir=nowhere"], "there is no run in this folder"),
        (["evaluate", "--workdir=nowhere", "--step=a"], "--step=a: expected an integer"),
        (["generate", "--workdir=nowhere", "--temperature=hot"], "--temperature=hot: expected a number"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_2(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"[1]", b'{"mesh": 3}'])
def test_a_damaged_configuration_is_one_sentence(capsys, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json is not a saved configuration" in refused(capsys, "evaluate", f"--workdir={tmp_path}")


def test_the_mesh_or_the_flag_sets_the_number_of_virtual_devices(monkeypatch):
    config = overrides.apply(Config(), [("mesh.pipe", "4"), ("mesh.data", "2")])
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=3")
    assert request_devices(config).mesh.product == 8
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=8"
    rest = overrides.apply(config, [("mesh.data", "-1")])
    assert request_devices(rest, 16).mesh.data == 4 and "count=16" in os.environ["XLA_FLAGS"]
    assert request_devices(rest) == rest  # the GPUs of the machine decide, later


def command(run) -> dict[str, Command]:
    flags = (Flag("json", False, "", "JSON"), Flag("name", (), "TEXT", "several"), Flag("size", 3, "N", "a number"))
    return {"try": Command("Try.", run, flags, ("model",))}


@pytest.mark.parametrize(("error", "code"), [(UserError("no"), 2), (CheckError("bad"), 4), (OSError("disk"), 1)])
def test_exit_codes_of_errors(capsys, error, code):
    def run(options):
        raise error

    assert dispatch(command(run), ["try"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_json_has_null_for_what_is_not_a_number(capsys):
    document = {"loss": float("nan"), "all": [1.5, (float("inf"), {"low": -float("inf")})]}
    assert dispatch(command(lambda options: (document, "", 0)), ["try", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"loss": None, "all": [1.5, [None, {"low": None}]]}


def test_an_unexpected_error_shows_where_and_exits_1(capsys):
    assert dispatch(command(lambda options: 1 / 0), ["try"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_json_is_alone_on_stdout(capsys):
    def run(options):
        print("progress")
        return {"size": options.size, "name": options.name, "changes": options.changes}, "text", 75

    arguments = ["try", "--json", "--size=4", "--name=a", "--name=b c", "--config.model.layers", "2"]
    assert dispatch(command(run), arguments) == 75
    out, err = capsys.readouterr()
    assert json.loads(out) == {"size": 4, "name": ["a", "b c"], "changes": [["model.layers", "2"]]}
    assert err == "progress\n"
    assert dispatch(command(run), ["try"]) == 75
    assert capsys.readouterr().out == "progress\ntext\n"


def test_as_a_process():
    result = subprocess.run(
        [sys.executable, "main.py", "train", "--workdir=x", "--config.train.stepz=1", DEMO],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: the configuration has no train.stepz: did you mean train.steps?\n"
