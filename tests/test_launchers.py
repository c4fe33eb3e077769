"""The launch scripts for real: mpirun, and sbatch in a Slurm that the test starts (make test-slurm)."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm.metrics import METRICS, read_jsonl
from tests import slurm
from tests.jobs import ROOT, running
from tests.llm.runs import SMALL

FOR_EVER = 1_000_000
CONFIG = """
from pathlib import Path

from llm import overrides
from llm.config import Config


def get_config():
    steps = (Path(__file__).parent / "steps").read_text()
    return overrides.apply(Config(), [*{options}.items(), ("train.steps", steps)])
"""
OPTIONS = {**SMALL, "mesh.data": 4, "optimizer.decay": "constant", "checkpoint.every": 50, "evaluate.every": 0}


class Run:
    """A run whose length is read from a file at each start, so that a test can let it end."""

    def __init__(self, folder: Path):
        self.folder, self.workdir = folder, folder / "run"
        (folder / "config.py").write_text(CONFIG.format(options={k: str(v) for k, v in OPTIONS.items()}))
        self.flags = [f"--config={folder / 'config.py'}", f"--workdir={self.workdir}"]
        self.until(FOR_EVER)

    def until(self, steps: int) -> None:
        (self.folder / "steps").write_text(str(steps))

    def steps(self) -> list[int]:
        return [line["step"] for line in read_jsonl(self.workdir / METRICS)]

    def saved(self) -> int:
        names = [path.name for path in (self.workdir / "checkpoints").glob("*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("CONVOY_PYTHON", sys.executable)
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))


FAKE = """#!/bin/bash
case "$*" in *preflight*) exit 0 ;; *train*) exit "$CODE" ;; esac
"""


@pytest.mark.parametrize("script", ["slurm.sh", "mpirun.sh"])
def test_scripts_go_on_after_failures_until_they_are_in_vain(tmp_path, monkeypatch, script):
    """With launchers that only end, with the code that is asked for."""
    for name, text in dict(srun=FAKE, mpirun=FAKE, sleep="#!/bin/bash", scontrol="#!/bin/bash").items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    flags = ["--", "--workdir", str(tmp_path)] if script == "mpirun.sh" else [f"--workdir={tmp_path}"]

    def ends(code: int) -> tuple[int, str]:
        command = ["bash", str(ROOT / "experiments/launch" / script), *flags]
        environment = os.environ | {"CODE": str(code)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    again, starts = "going on from the newest checkpoint", 1 if script == "mpirun.sh" else 4
    texts = [ends(1) for _ in range(starts)]
    assert sum(text.count(again) for _, text in texts) == 3
    assert texts[-1][0] == 1 and "4 times in a row without a new checkpoint: giving up" in texts[-1][1]
    assert [ends(code)[0] for code in (0, 2, 4)] == [0, 2, 4]
    assert ends(75)[0] == (75 if script == "mpirun.sh" else 0)
    if script == "slurm.sh":  # a new checkpoint makes the failures before it forgotten
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        assert again in ends(1)[1] and ends(1)[0] == 0


@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed (Debian: openmpi-bin)")
def test_mpirun_trains_stops_after_a_signal_and_goes_on(tmp_path, monkeypatch):
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_plm", "isolated")  # one machine: no ssh is needed
    run = Run(tmp_path)
    script = ["bash", "experiments/launch/mpirun.sh", "-n", "2", "--oversubscribe", "--", *run.flags]
    with running([script], tmp_path / "first") as children:
        children.wait_until(lambda: len(run.steps()) >= 3)
        children.signal(signal.SIGTERM, process=0)
        (first,) = children.wait()
    assert first.code == 75, children.output()
    stopped = run.saved()
    assert run.steps() == list(range(1, stopped + 1)) and "in all 2 processes" in first.out
    run.until(stopped + 3)
    with running([script], tmp_path / "second") as children:
        (second,) = children.wait()
    assert second.code == 0, children.output()
    assert f"resuming from step {stopped}" in second.out and run.steps() == list(range(1, stopped + 4))


@pytest.mark.slurm
def test_slurm_trains_is_signalled_before_its_limit_requeues_resumes_and_finishes(tmp_path_factory, request):
    reason = slurm.missing() if "slurm" in request.config.getoption("-m") else "minutes long: make test-slurm runs it"
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")  # a short name, for the socket in it
    run = Run(folder)
    try:
        cluster = slurm.Slurm(folder)
        cluster.start()
        states = follow(cluster, run)
    except slurm.NotStarted as error:
        pytest.skip(str(error))
    finally:
        cluster.stop()
    print(json.dumps(states))


def follow(cluster: slurm.Slurm, run: Run) -> list[str]:
    """Submit the job and see it through: the states that it went through."""
    limits = ["--time=4", "--signal=USR1@60", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2"]
    output = run.folder / "job.out"
    job = cluster.run(
        "sbatch", "--parsable", *limits, f"--output={output}", str(ROOT / "experiments/launch/slurm.sh"), *run.flags
    )
    states, stopped, deadline = [], 0, time.monotonic() + 900
    while (known := cluster.job(job))["JobState"] not in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
        states.append(known["JobState"])
        if known["Restarts"] == "1" and not stopped and known["JobState"] == "PENDING":
            stopped = run.saved()
            run.until(stopped + 5)
            cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # else it waits for two minutes
        assert time.monotonic() < deadline, output.read_text()[-4000:]
        time.sleep(0.5)
    text = output.read_text()
    assert (known["JobState"], known["ExitCode"], known["Restarts"]) == ("COMPLETED", "0:0", "1"), text[-4000:]
    assert stopped > 0 and run.steps() == list(range(1, stopped + 6)), text[-4000:]
    lines = [
        "in all 2 processes",
        "SIGUSR1",
        "stopped by a signal and saved: going on",
        f"resuming from step {stopped}",
        "finished",
    ]
    places = [re.search(line, text) for line in lines]
    assert all(places) and [place.start() for place in places] == sorted(place.start() for place in places), text[-4000:]
    assert text.count("in all 2 processes") < 2 * 4  # preflight ran once
    return [state for state, _ in itertools.groupby(states)] + [known["JobState"]]
