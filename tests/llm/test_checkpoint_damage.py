"""Checkpoints that were killed, cut, flipped or not written: nothing is lost, damage is found and set aside."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import llm.checkpoint
from llm.checkpoint import Checkpoints, read
from parallel.errors import CheckError, UserError
from tests.llm.states import assert_equal, flip, save

KILLED = """
import os, signal
from tests.llm import states as t
import llm.checkpoint as c
setup = t.Setup(pipe=2, chunks=2)
t.save({folder!r}, setup, 10)
whole = c.write_shards
def once(folder, name, *args):
    if name == "params/embedding":
        os.kill(os.getpid(), signal.SIGKILL)
    whole(folder, name, *args)
c.write_shards = once
t.save({folder!r}, setup, 20)
"""


@pytest.mark.smoke
def test_killed_while_saving(setups, tmp_path, caplog):
    code = textwrap.dedent(KILLED.format(folder=str(tmp_path / "run")))
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, timeout=120, text=True)
    assert result.returncode == -9, result.stderr
    assert [path.name for path in (tmp_path / "run").glob("20*")] == ["20.orbax-checkpoint-tmp"]
    checkpoints, setup = Checkpoints(tmp_path / "run", 3), setups["pipe4"]
    assert checkpoints.latest() == 10 and "20.orbax-checkpoint-tmp is unfinished" in caplog.text
    assert_equal(checkpoints.restore(10, setup.abstract, setup.stored), setup.expected(10))
    for step in (20, 30):
        checkpoints.save(step, setup.state(step), setup.stored, {})
    checkpoints.close()
    assert Checkpoints(tmp_path / "run", 3).steps() == [10, 20, 30]
    assert_equal(checkpoints.restore(20, setup.abstract, setup.stored), setup.expected(20))
    assert not list((tmp_path / "run").glob("*tmp"))


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "no manifest"])
def test_an_incomplete_step_is_passed_over(damage, setups, tmp_path, caplog):
    """A folder that lacks files is not resumed from, is named in a warning and makes room for the next save of it."""
    setup = setups["pipe2 v2"]
    save(tmp_path, setup, 10, 20)
    state = tmp_path / "20" / "state"
    file = state / ("manifest.json" if "manifest" in damage else "params/block/query/c/3/0/0/0")
    if damage in ("cut", "manifest"):
        file.write_bytes(file.read_bytes()[:-9])
    else:
        file.unlink()
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.latest() == 10
    assert "step 20" in caplog.text and ("manifest" if "manifest" in damage else "params/block/query") in caplog.text
    with pytest.raises(CheckError, match=r"step 20 .*"):
        checkpoints.restore(20, setup.abstract, setup.stored)
    damaged = sorted(path.relative_to(tmp_path / "20") for path in (tmp_path / "20").rglob("*"))
    for step in (20, 30):
        checkpoints.save(step, setup.state(step), setup.stored, {})
    checkpoints.close()
    assert Checkpoints(tmp_path, 2).steps() == [20, 30]
    assert_equal(checkpoints.restore(20, setup.abstract, setup.stored), setup.expected(20))
    aside = tmp_path / "20.damaged"
    assert sorted(path.relative_to(aside) for path in aside.rglob("*")) == damaged


def test_what_is_not_damaged_is_left_alone(setups, tmp_path, monkeypatch):
    """A step of a newer version, or one that the system cannot read at the moment; and names that are no steps."""
    setup = setups["one"]
    save(tmp_path, setup, 10)
    monkeypatch.setattr("llm.arrays.FORMAT", 2)
    save(tmp_path, setup, 20)
    monkeypatch.undo()
    (tmp_path / "30").write_text("not a folder")
    for name in ("007", "٣", "40.damaged"):
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path, 1)
    assert checkpoints.steps() == [10]
    with pytest.raises(UserError, match=r"step 20 .* has format 2, this version reads up to 1.*nothing was changed"):
        checkpoints.latest()
    with pytest.raises(OSError, match="step 20"):
        checkpoints.save(20, setup.state(), setup.stored, {})
    save(tmp_path, setup, 40, keep=1)
    assert (tmp_path / "20/state/manifest.json").is_file() and (tmp_path / "30").is_file()
    monkeypatch.setattr("llm.arrays.Path.read_text", lambda path, **_: raise_(PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match="Permission denied"):
        Checkpoints(tmp_path, 1).latest()


def raise_(error):
    raise error


def test_the_one_before_a_damaged_one_is_taken(setups, tmp_path, caplog):
    """A flipped bit is found while reading; the next save sets the step aside, also under a name that is taken."""
    setup = setups["pipe2 v2"]
    save(tmp_path, setup, 10, 20, 30)
    for step in (20, 30):
        flip(tmp_path / str(step) / "state/params/block/query/c/3/0/0/0")
    (tmp_path / "30.damaged").mkdir()
    checkpoints = Checkpoints(tmp_path, 9)
    assert checkpoints.latest() == 30
    step, state = checkpoints.newest(lambda step: checkpoints.restore(step, setup.abstract, setup.stored))
    assert step == 10 and "step 30 is left out" in caplog.text and "step 20 is left out" in caplog.text
    assert_equal(state, setup.expected(10))
    checkpoints.save(20, setup.state(20), setup.stored, {})
    checkpoints.close()
    assert Checkpoints(tmp_path, 9).steps() == [10, 20]
    assert {path.name for path in tmp_path.iterdir()} == {"10", "20", "20.damaged", "30.damaged", "30.damaged2"}


def test_nothing_readable_is_refused_and_left_alone(setups, tmp_path):
    save(tmp_path, setups["one"], 10, 20)
    (tmp_path / "10/state/manifest.json").unlink()
    flip(tmp_path / "20/state/step/c")
    before = sorted(tmp_path.rglob("*"))
    read = lambda step: Checkpoints(tmp_path, 1).restore(step, setups["one"].abstract, setups["one"].stored)
    with pytest.raises(CheckError, match=r"no checkpoint .* can be read; nothing was changed"):
        Checkpoints(tmp_path, 1).newest(read)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("file", ["c/3/0/0/0", "zarr.json"])
def test_a_flipped_bit_is_found(file, setups, tmp_path):
    setup = setups["pipe2 v2"]
    save(tmp_path, setup, 20)
    path = tmp_path / "20" / "state" / "params/block/query" / file
    content = bytearray(path.read_bytes())
    content[content.index(b"7") if file == "zarr.json" else 40] ^= 1  # 7 layers become 6
    path.write_bytes(content)
    for act in (
        lambda: Checkpoints(tmp_path, 1).restore(20, setup.abstract, setup.stored),
        lambda: read(tmp_path, 20, "params/block/query", 3),
    ):
        with pytest.raises(CheckError, match=r"step 20 .*params/block/query is damaged"):
            act()
    if file != "zarr.json":
        read(tmp_path, 20, "params/block/query", 2)  # the other layers are whole


def until_it_fails(checkpoints):
    for _ in range(1000):  # it does not wait for what goes on in the background
        checkpoints.check()
        time.sleep(0.01)


@pytest.mark.parametrize("when", ["save", "wait", "close", "check"])
def test_a_failed_save_surfaces(when, setups, tmp_path, monkeypatch):
    setup = setups["pipe2 v2"]
    save(tmp_path, setup, 10)
    checkpoints = Checkpoints(tmp_path, 1)

    def fail(folder, name, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(llm.checkpoint, "write_shards", fail)
    checkpoints.save(20, setup.state(), setup.stored, {})
    act = {"save": lambda: checkpoints.save(30, setup.state(), setup.stored, {}), "check": lambda: until_it_fails(checkpoints)}
    with pytest.raises(OSError, match=r"step 20 .*No space left"):
        act.get(when, getattr(checkpoints, when))()
    monkeypatch.undo()
    assert checkpoints.steps() == [10]
    checkpoints.wait()
    for step in (20, 30):
        checkpoints.save(step, setup.state(step), setup.stored, {})
    checkpoints.close()
    assert checkpoints.steps() == [30]
    assert_equal(checkpoints.restore(30, setup.abstract, setup.stored), setup.expected(30))
