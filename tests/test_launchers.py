"""The launch scripts for real: mpirun, and sbatch in a Slurm that the test starts (make test-slurm)."""

import itertools
import json
import os
import re
import shutil
import signal
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


@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed (Debian: openmpi-bin)")
def test_mpirun_trains_stops_after_a_signal_and_goes_on(tmp_path, monkeypatch):
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
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
