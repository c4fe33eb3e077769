"""The command `checkpoints`: list, verify, look into, compare, copy, prune."""

import json
import shutil

import jax
import numpy as np
import pytest

from llm.checkpoint import Checkpoints, read
from llm.commandline import dispatch
from llm.config import Config
from llm.workdir import locked, save_config
from main import COMMANDS
from parallel.sharding import Stored

INDEX = np.array([[[0, 1], [2, -1]]])
STORED = {"params": {"up": Stored((3, 4, 5), INDEX), "norm": Stored((4,))}, "step": Stored(())}


def state(step):
    up = np.random.default_rng(step).normal(size=(1, 2, 2, 4, 5)).astype(np.float32)
    up[0, 1, 1] = 0
    return jax.tree.map(jax.device_put, {"params": {"up": up, "norm": np.full(4, step, np.float32)}, "step": np.int32(step)})


@pytest.fixture
def run(tmp_path):
    """Steps 10 to 40 of a run that keeps its newest and its best; 20 is the best, 30 has no metric."""
    workdir = tmp_path / "run"
    save_config(workdir, Config().validate())
    (workdir / "tokenizer.json").write_text("{}")
    checkpoints = Checkpoints(workdir / "checkpoints", 9)
    for step, loss in ((10, 3.0), (20, 1.0), (30, None), (40, 2.0)):
        meta = {"eval_loss": loss, "loss": loss, "position": step + 1, "config": {"mesh": {"pipe": 2}, "seed": step}}
        checkpoints.save(step, state(step), STORED, meta)
    checkpoints.close()
    return workdir


def call(capsys, run, *flags, code=0):
    """The JSON document of the command; the text must say as much."""
    assert dispatch(COMMANDS, ["checkpoints", f"--workdir={run}", *flags, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def text(capsys, run, *flags, code=0):
    assert dispatch(COMMANDS, ["checkpoints", f"--workdir={run}", *flags]) == code
    return capsys.readouterr()


def damage(run, step):
    path = run / f"checkpoints/{step}/state/params/up/c/1/0/0"
    content = bytearray(path.read_bytes())
    content[3] ^= 16
    path.write_bytes(content)


@pytest.mark.smoke
def test_lists_and_verifies(run, capsys):
    (run / "checkpoints/50.orbax-checkpoint-tmp/state").mkdir(parents=True)
    (run / "checkpoints/15.damaged").mkdir()
    (run / "checkpoints/60").write_text("no folder")
    damage(run, 30)
    listed = call(capsys, run)
    assert listed["ok"] and [line["step"] for line in listed["checkpoints"]] == [10, 15, 20, 30, 40, 50]
    assert [line["state"] for line in listed["checkpoints"]] == [
        "complete", "set aside", "complete", "complete", "complete", "unfinished",
    ]  # fmt: skip
    assert listed["checkpoints"][2]["eval_loss"] == 1.0 and listed["checkpoints"][2]["size_bytes"] > 3 * 4 * 5 * 4
    verified = call(capsys, run, "--verify", code=4)
    assert not verified["ok"] and [line["state"] for line in verified["checkpoints"]][3] == "damaged"
    assert "array params/up is damaged" in verified["checkpoints"][3]["detail"]
    shown = text(capsys, run, "--verify", code=4).out
    assert "30" in shown and "array params/up is damaged" in shown and "verified" in shown
    (run / "checkpoints/40/state/manifest.json").unlink()
    assert [line["state"] for line in call(capsys, run)["checkpoints"]][4] == "damaged"
    shutil.rmtree(run / "checkpoints")
    assert text(capsys, run).out == "no checkpoint yet\n" and call(capsys, run, "--verify") == {"ok": True, "checkpoints": []}


def test_shows_shapes_and_norms(run, capsys):
    shown = call(capsys, run, "--tree", "--step=20")
    assert (shown["step"], shown["position"], shown["layout"], shown["numbers"]) == (20, 21, {"pipe": 2}, 65)
    up = next(line for line in shown["arrays"] if line["name"] == "params/up")
    whole = read(run / "checkpoints", 20, "params/up").astype(np.float64)
    assert up["shape"] == [3, 4, 5] and up["dtype"] == "float32" and up["not_finite"] == 0
    assert up["norm"] == pytest.approx(np.linalg.norm(whole)) and up["largest"] == pytest.approx(np.abs(whole).max())
    lines = text(capsys, run, "--tree").out.splitlines()
    assert lines[0] == "step 40, saved by pipe 2, next batch 41, 65 numbers" and lines[2] == "params"
    assert lines[3].split() == ["norm", "4", "float32", "80", "40"]


def test_compares_two_steps(run, capsys):
    found = call(capsys, run, "--diff=10:20")
    assert found["steps"] == [10, 20] and found["config"] == {"seed": [10, 20]} and found["only"] == {"10": [], "20": []}
    by_name = {line["name"]: line for line in found["arrays"]}
    assert by_name["params/norm"] == {"name": "params/norm", "relative": 1.0, "largest": 10.0}
    old, new = (read(run / "checkpoints", step, "params/up").astype(np.float64) for step in (10, 20))
    assert by_name["params/up"]["relative"] == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))
    assert "config seed: 10 -> 20" in text(capsys, run, "--diff=10:20").out
    assert all(line["relative"] == 0 for line in call(capsys, run, "--diff=20:20")["arrays"])
    for wrong in ("10", "10:x", "10:70"):
        assert dispatch(COMMANDS, ["checkpoints", f"--workdir={run}", f"--diff={wrong}"]) == 2
        capsys.readouterr()


def test_copies_what_it_has_verified(run, tmp_path, capsys):
    copied = call(capsys, run, f"--copy={tmp_path}/new", "--step=20")
    assert copied["step"] == 20 and (tmp_path / "new/tokenizer.json").is_file()
    assert call(capsys, tmp_path / "new", "--verify")["checkpoints"][0]["state"] == "complete"
    np.testing.assert_array_equal(
        read(tmp_path / "new/checkpoints", 20, "params/up"), read(run / "checkpoints", 20, "params/up")
    )
    assert "already" in text(capsys, run, f"--copy={tmp_path}/new", "--step=20", code=2).err
    assert "own folder" in text(capsys, run, f"--copy={run}", code=2).err
    damage(run, 40)
    assert "was not copied: array params/up is damaged" in text(capsys, run, f"--copy={tmp_path}/new", code=4).err
    assert [path.name for path in (tmp_path / "new/checkpoints").iterdir()] == ["20"]


def test_prunes(run, capsys):
    (run / "checkpoints/50.orbax-checkpoint-tmp").mkdir()
    (run / "checkpoints/15.damaged").mkdir()
    damaged = run / "checkpoints/5"
    shutil.copytree(run / "checkpoints/10", damaged)
    (damaged / "state/manifest.json").unlink()
    with locked(run):
        assert "another process works in" in text(capsys, run, "--prune", code=2).err
    pruned = call(capsys, run, "--prune", "--keep=1", "--best=1")
    assert pruned["kept"] == [20, 40] and pruned["freed_bytes"] > 0
    assert sorted(pruned["deleted"]) == ["10", "15.damaged", "30", "50.orbax-checkpoint-tmp"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["20", "40", "5"]
    assert "deleted nothing" in text(capsys, run, "--prune").out
    assert "at least the newest checkpoint stays" in text(capsys, run, "--prune", "--keep=0", code=2).err


@pytest.mark.smoke
def test_what_makes_no_sense_is_refused(run, tmp_path, capsys):
    assert "one at a time" in text(capsys, run, "--tree", "--prune", code=2).err
    assert "are of --prune" in text(capsys, run, "--keep=3", code=2).err
    assert "no run in this folder" in text(capsys, tmp_path / "none", code=2).err
    assert not (tmp_path / "none").exists()
    assert "the steps 10, 20, 30, 40" in text(capsys, run, "--tree", "--step=7", code=2).err
