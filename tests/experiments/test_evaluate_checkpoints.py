"""Every checkpoint of a run in one table and one picture."""

import json

import pytest

from experiments import evaluate_checkpoints
from llm.checkpoint import Checkpoints
from llm.commandline import dispatch
from llm.evaluate import evaluate, evaluate_tasks
from llm.run import open_run
from llm.train import train
from tests.llm.runs import small

COMMANDS = {"evaluate_checkpoints": evaluate_checkpoints.COMMAND}


@pytest.fixture
def call(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

    def run(*arguments):
        code = dispatch(COMMANDS, ["evaluate_checkpoints", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_every_checkpoint_is_scored_as_the_command_does(call, tmp_path, capsys, monkeypatch):
    workdir, file = tmp_path / "run", tmp_path / "mine.jsonl"
    file.write_text('{"context": "The state of the", "continuation": " union"}\n{"context": "We", "continuation": " must"}\n')
    name = f"file:{file}"
    train(small(model__layers=2, train__steps=3, checkpoint__every=1, checkpoint__keep=3, evaluate__every=0), workdir)
    capsys.readouterr()
    code, out, _ = call(f"--workdir={workdir}", f"--tasks={name}", "--json", "--config.mesh.pipe=2")
    lines = json.loads(out)
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3]
    want = evaluate(workdir, step=2)
    got = lines[1]["scores"]["held out"]
    assert {key: got[key] for key in got} == pytest.approx({key: want[key] for key in got}, rel=1e-5)
    assert lines[2]["scores"][name] == pytest.approx(evaluate_tasks(workdir, [name])["tasks"][name], rel=1e-5)
    assert "has changed" not in capsys.readouterr().out
    monkeypatch.setattr(Checkpoints, "meta", lambda self, step: {"corpus": "of other documents"})
    open_run(workdir)
    assert "the text that data.paths names has changed since step 3 was saved" in capsys.readouterr().out
    assert json.loads((workdir / "evaluations/checkpoints.json").read_text()) == lines
    assert (workdir / "evaluations/checkpoints.png").stat().st_size > 10_000
    table = evaluate_checkpoints.table(lines).splitlines()
    assert table[0].split() == ["step", "1", "step", "2", "step", "3"]
    assert [line.split()[:1] for line in table if " acc " in line] == [[name]]


@pytest.mark.smoke
def test_what_cannot_be_scored_is_refused(call, tmp_path):
    code, _, err = call(f"--workdir={tmp_path}")
    assert code == 2 and "no run in this folder" in err
