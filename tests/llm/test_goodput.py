"""Where the time of a run went: logs made by hand, and a run that was really killed and gone on with."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from llm import events
from llm.commandline import dispatch
from llm.config import Config
from llm.data.corpus import Corpus
from llm.data.sources import ROOT
from llm.events import EVENTS, EventLog
from llm.goodput import LOST, account, goodput, table
from llm.metrics import METRICS, read_jsonl
from llm.workdir import save_config
from main import COMMANDS
from parallel.errors import UserError
from tests.llm.runs import small


@pytest.fixture
def undrawn(monkeypatch):
    """The numbers alone, for the tests that do not look at the picture."""
    monkeypatch.setattr("llm.goodput._draw", lambda *_: None)


def write(folder, lines):
    """A log of (time, run_s, kind, step, more facts)."""
    save_config(folder, Config())
    with open(folder / EVENTS, "a") as file:
        for when, run_s, kind, step, *facts in lines:
            line = {"time": when, "run_s": run_s, "kind": kind, "step": step, "data_s": 0.0, **dict(*facts)}
            file.write(json.dumps(line) + "\n")


def start(at, step, *phases):
    """Lines of one start that began at the time `at`: phases are (run_s, kind, step, facts)."""
    return [(at, 0, "start", step), *((at + run_s, run_s, kind, *rest) for run_s, kind, *rest in phases)]


def adds_up(document):
    assert document["productive_s"] + sum(document["lost_s"].values()) == pytest.approx(document["wall_s"], abs=1e-6)
    assert tuple(document["lost_s"]) == LOST and min(document["lost_s"].values()) >= 0 and document["productive_s"] >= 0
    return document


FIRST = start(
    1000,
    0,
    (3, "data", 0),
    (4, "compile", 0),
    (10, "steps", 0),
    (20, "steps", 5, {"data_s": 2.0}),
    (30, "save", 10, {"data_s": 1.0}),
    (31, "steps", 10),
    (41, "evaluation", 15),
    (45, "sample", 15),
    (46, "steps", 15),
    (56, "steps", 20),
)


@pytest.mark.smoke
def test_a_killed_run_loses_the_updates_since_its_checkpoint(tmp_path, capsys):
    second = start(1100, 10, (2, "restore", 10), (5, "compile", 10), (9, "steps", 10), (29, "save", 30))
    last = (1130, 30, "stop", 30, {"why": "finished"})
    write(tmp_path, [*FIRST, *second, last])
    document = adds_up(goodput(tmp_path))
    assert document["wall_s"] == 130
    lost = dict(start=3 + 2, compile=6 + 4, restore=3, save=1 + 1, evaluation=4 + 1, data=1 + 3, rework=10 + 10, down=44)
    assert document["lost_s"] == lost
    assert document["productive_s"] == 17 + 20 and document["goodput"] == 37 / 130
    assert [(s["from_step"], s["to_step"], s["stopped"]) for s in document["starts"]] == [(0, 20, None), (10, 30, "finished")]
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
    assert dispatch(COMMANDS, ["goodput", f"--workdir={tmp_path}", f"--draw={tmp_path}/a.svg", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == document | {"picture": f"{tmp_path}/a.svg"} and (tmp_path / "a.svg").is_file()
    text = table(document)
    assert "rework              20.0 s    15.4%" in text and "steps 0 to 20, 56.0 s, killed" in text


def test_a_checkpoint_between_two_lines_divides_their_updates(tmp_path, undrawn):
    write(tmp_path, [*FIRST, *start(1100, 12, (1, "stop", 12, {"why": "SIGTERM"}))])
    document = adds_up(goodput(tmp_path))
    assert document["lost_s"]["rework"] == pytest.approx(0.6 * 10 + 10)  # 3 of the 5 updates of the line, and all after it


def test_a_damaged_newest_checkpoint_takes_back_more(tmp_path, undrawn):
    write(tmp_path, [*FIRST, *start(1100, 10, (1, "restore", 10), (3, "compile", 5), (4, "steps", 5), (6, "steps", 7))])
    document = adds_up(goodput(tmp_path))
    assert document["lost_s"]["rework"] == 9 + 10 + 10  # the updates after the fifth, whatever `start` hoped for
    assert document["productive_s"] == 8 + 2


def test_several_restarts_lose_an_update_once(tmp_path, undrawn):
    lines = [*FIRST]
    for number in range(3):  # each dies before its next checkpoint
        lines += start(1100 + 100 * number, 10, (1, "steps", 10), (6, "steps", 12))
    write(tmp_path, lines)
    document = adds_up(goodput(tmp_path))
    assert document["lost_s"]["rework"] == 20 + 5 + 5 and document["productive_s"] == 17 + 5
    assert len(document["starts"]) == 4


def test_a_roll_back_takes_updates_back(tmp_path, undrawn):
    phases = [(1, "steps", 0), (11, "save", 10), (12, "steps", 10), (22, "rollback", 20), (24, "data", 10), (25, "steps", 10)]
    write(tmp_path, start(50, 0, *phases, (35, "stop", 20, {"why": "finished"})))
    document = adds_up(goodput(tmp_path))
    assert document["lost_s"] == dict.fromkeys(LOST, 0) | dict(start=1, save=1, rework=10, restore=2, data=1)
    assert document["productive_s"] == 20


@pytest.mark.parametrize(("why", "rework"), [("watchdog: no end of the step", 300), ("ValueError: x", 300), ("SIGTERM", 0)])
def test_a_hung_update_is_no_productive_time(tmp_path, undrawn, why, rework):
    lines = start(0, 0, (1, "steps", 0), (11, "save", 10), (12, "steps", 10), (312, "stop", 10, {"why": why}))
    write(tmp_path, [*lines, *start(400, 10, (1, "steps", 10), (2, "steps", 11))])
    assert adds_up(goodput(tmp_path))["lost_s"]["rework"] == rework


def test_clocks_that_go_backwards(tmp_path, undrawn):
    lines = [*FIRST[:4], (500, 15, "steps", 4), (501, 14, "steps", 6)]  # set back, and a clock that cannot be
    write(tmp_path, [*lines, *start(700, 6, (1, "steps", 6), (2, "steps", 7))])
    document = adds_up(goodput(tmp_path))
    assert document["lost_s"]["down"] == 0 and document["wall_s"] == 15 + 2
    assert document["productive_s"] == 5 + 1


def test_torn_and_foreign_lines_are_left_out(tmp_path, undrawn):
    write(tmp_path, FIRST)
    whole = goodput(tmp_path)
    with open(tmp_path / EVENTS, "a") as file:
        file.write('[1]\n{"kind": "steps"}\n{"time": 1, "run_s": "x", "kind": "steps", "step": 1, "data_s": 0}\n')
        file.write('{"time": 1, "run_s": 99, "kind": "unheard of", "step": 1, "data_s": 0}\n\x00\xff\n{"time": 1060, "run_')
    assert goodput(tmp_path) == whole
    with EventLog(tmp_path) as log:  # its first line must not be the rest of the torn one
        log.write("start")
    assert len(account(events.read(tmp_path))) == 2
    (tmp_path / EVENTS).write_text((tmp_path / EVENTS).read_text().partition("\n")[2])  # without the first line
    adds_up(goodput(tmp_path))


def test_runs_without_a_log(tmp_path):
    with pytest.raises(UserError, match="no run in this folder"):
        goodput(tmp_path)
    save_config(tmp_path, Config())
    with pytest.raises(UserError, match=r"no events\.jsonl yet"):
        goodput(tmp_path)
    write(tmp_path, start(5, 0))
    assert adds_up(goodput(tmp_path))["goodput"] is None
    with pytest.raises(UserError, match=r"the picture .*a\.png cannot be written"):
        goodput(tmp_path, str(tmp_path / "nowhere" / "a.png"))


def test_the_log_says_that_the_run_is_alive_but_not_during_steps(tmp_path):
    log = EventLog(tmp_path, beat=0.05)
    log.write("start", devices=1)
    time.sleep(0.2)
    log.write("steps")
    time.sleep(0.2)
    log.close("SIGTERM")
    log.write("steps")  # too late: nothing happens
    kinds = [(line["kind"], line.get("alive", False)) for line in events.read(tmp_path)]
    assert kinds[0] == ("start", False) and kinds[1] == ("start", True) and kinds[-2:] == [("steps", False), ("stop", False)]
    assert ("steps", True) not in kinds and sum(alive for _, alive in kinds) >= 2
    assert account(events.read(tmp_path))[0].why == "SIGTERM"
    for thread in threading.enumerate():
        if thread.name == "events":
            thread.join(5)
            assert not thread.is_alive()


def test_a_hung_run_says_why_it_ends(tmp_path, monkeypatch):
    log = EventLog(tmp_path)
    log.write("start")
    log.write("steps")
    log.close_soon("watchdog: no end of the step")
    assert account(events.read(tmp_path))[0].why == "watchdog: no end of the step"
    hung = EventLog(tmp_path)
    hung.write("start")
    monkeypatch.setattr(events.threading.Thread, "join", lambda self, timeout: time.sleep(timeout / 50))
    with hung._changed:  # as when writing the log is what hangs
        hung.close_soon("watchdog: no end of saving")
    assert account(events.read(tmp_path))[1].why in (None, "watchdog: no end of saving")


def test_a_refused_start_leaves_no_line(tmp_path):
    write(tmp_path, FIRST)
    before = (tmp_path / EVENTS).read_bytes()
    for error, kind, kept in ((UserError, "start", False), (UserError, "steps", True), (OSError, "start", True)):
        with pytest.raises(error), EventLog(tmp_path) as log:
            log.write("start")
            if kind != "start":
                log.write(kind)
            raise error("no")
        assert (before != (tmp_path / EVENTS).read_bytes()) == kept
        (tmp_path / EVENTS).write_bytes(before)


def test_long_runs_have_few_lines(tmp_path, monkeypatch):
    log, now = EventLog(tmp_path, began=0.0), [0.0]
    monkeypatch.setattr(events.time, "monotonic", lambda: now[0])
    log.write("start")
    log.write("steps")
    for step in range(1, 40_001):  # 0.5 s each
        now[0] += 0.5
        log.progress(step)
    monkeypatch.undo()
    log.close("finished")
    lines = events.read(tmp_path)
    assert 500 < len(lines) < 1500 and max(b["run_s"] - a["run_s"] for a, b in itertools.pairwise(lines[:-1])) <= 31
    assert lines[-1]["step"] == 40_000


def test_a_log_that_cannot_be_written_does_not_stop_the_run(tmp_path, capsys):
    with EventLog(tmp_path / "nowhere") as log:
        log.write("start")
        log.write("steps")
    assert capsys.readouterr().err.count("events.jsonl cannot be written") == 1
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / EVENTS).symlink_to("/dev/full")
    with EventLog(tmp_path / "full") as log:
        log.write("start")
        log.write("steps")
    assert capsys.readouterr().err.count("No space left") == 1
    with EventLog(None) as log:
        log.write("start")
    log = EventLog(tmp_path)
    with pytest.raises(ZeroDivisionError), log:
        raise ZeroDivisionError
    assert not (tmp_path / EVENTS).exists()  # what is refused before its start leaves nothing


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from llm import events
from llm.commandline import dispatch
from llm.metrics import Metrics
from llm.train import train
from tests.llm.runs import small
events.RARELY = 0.0  # a line for every step
write = Metrics.step
def step(self, record):
    write(self, record)
    if record["step"] == 57:
        os.kill(os.getpid(), signal.SIGKILL)
Metrics.step = step
train(small(**eval(sys.argv[3])), sys.argv[2])
"""
TINY = dict(
    model__layers=1,
    model__width=16,
    model__vocab=300,
    batch__rows=2,
    batch__length=16,
    train__steps=70,
    checkpoint__every=20,
    evaluate__every=60,
)


def test_a_run_that_was_killed_and_gone_on_with(tmp_path, monkeypatch):
    began = time.time()
    command = [sys.executable, "-c", KILLED, str(ROOT), str(tmp_path), repr(TINY)]
    assert subprocess.run(command, timeout=300, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
    killed = time.time()
    steps = {line["step"]: line["step_time_s"] for line in read_jsonl(tmp_path / METRICS) if "loss" in line}
    from llm.train import train

    read = Corpus.batch
    monkeypatch.setattr(Corpus, "batch", lambda *args, **how: (time.sleep(0.1), read(*args, **how))[1])
    train(small(**TINY), tmp_path)
    document = adds_up(goodput(tmp_path))
    ended = time.time()
    (first, second), lost = document["starts"], document["lost_s"]
    assert (first["from_step"], first["stopped"]) == (0, None) and first["to_step"] in (56, 57)
    assert (second["to_step"], second["stopped"]) == (70, "finished")
    assert second["from_step"] in (20, 40)  # the save of 40 goes on in the background
    # The updates after the checkpoint were made and are made again; the metrics' times hold a little less than the log's.
    again = sum(seconds for step, seconds in steps.items() if second["from_step"] < step <= first["to_step"])
    assert again * 0.5 < lost["rework"] < again * 2 + 0.5
    assert began < first["time"] < killed < second["time"] and document["wall_s"] < ended - began
    assert lost["down"] == pytest.approx(second["time"] - first["time"] - first["wall_s"], abs=1e-3)
    reads = 70 - second["from_step"]  # each keeps the devices waiting, but for the time of a step
    assert reads * 0.05 < lost["data"] < reads * 0.1 + document["wall_s"] * 0.2
    assert min(lost[kind] for kind in ("start", "compile", "restore", "save", "evaluation")) > 0
    kinds = [line["kind"] for line in events.read(tmp_path) if not line.get("alive")]
    assert kinds[:4] == ["start", "data", "compile", "steps"] and kinds[-1] == "stop"
    assert os.path.getsize(document["picture"]) > 10_000
