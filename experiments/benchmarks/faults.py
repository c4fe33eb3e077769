"""The fault campaign: a small training run is killed, starved and damaged again and again, and must end as if nothing had been.

    python experiments/benchmarks/faults.py --trials=30

Each trial starts `main.py train` in a new folder and does something to it: SIGKILL at a random moment of a phase (start,
compile, steps, evaluation, save, and just before or after a save's final rename), a checkpoint file cut short or with one
bit flipped, a full disk (a tmpfs; a limit on the size of files where mounting is not allowed), a step that hangs until the
watchdog ends it, SIGTERM to one of two processes. Then the same command is started again until it is done.

A trial is survived when the run's metrics are those of the undisturbed run, number for number, the process ended with the
promised exit code, and no more steps were lost than since the last checkpoint and while a save was under way (one interval
more when the newest checkpoint was damaged). The phase of a kill is what the run's own log of events and the checkpoint
folder say it was. When fewer than five kills fell into a save or into the compilation, it goes on. About half a minute a
trial on two idle cores. The last line is JSON: trials, survived, by_phase (of the kills), by_fault, max_steps_lost,
checkpoint_every.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llm.checkpoint import UNFINISHED
from llm.events import read
from llm.metrics import METRICS, read_jsonl
from llm.workdir import CHECKPOINTS, step_folders

ROOT = Path(__file__).resolve().parents[2]
EVERY, STEPS, FEWEST, LIMIT = 8, 40, 5, 600.0
CONFIG = f"""
from llm.config import *

def get_config():
    return Config(
        model=ModelConfig(layers=4, width=64, heads=2, vocab=320, dropout=0.1),
        mesh=MeshConfig(pipe=2),
        batch=BatchConfig(rows=16, length=64),
        data=DataConfig(paths=("llm/data/text/197*.txt",), held_out="1"),
        optimizer=OptimizerConfig(warmup=5),
        train=TrainConfig(steps={STEPS}),
        checkpoint=CheckpointConfig(every={EVERY}, keep=3),
        evaluate=EvaluateConfig(every=16),
    )
"""
PLAN = (
    "kill save", "kill compile", "flipped", "kill steps", "kill before rename", "full disk", "kill compile", "truncated",
    "kill save", "two processes", "kill start", "kill compile", "stalled", "kill after rename", "kill evaluation",
    "kill save", "flipped", "kill compile", "kill steps", "truncated", "kill before rename", "full disk", "kill compile",
    "two processes", "kill save", "stalled", "kill steps", "flipped", "kill compile", "truncated",
)  # fmt: skip


class Job:
    """`main.py train` in a folder, in one or two processes."""

    def __init__(self, scratch: Path, workdir: Path, processes: int = 1):
        self.scratch, self.workdir, self.processes = scratch, workdir, processes
        self.children: list[subprocess.Popen] = []

    def start(self, cache: bool = True, inside: str = "", watchdog: float = -1) -> None:
        """inside: what a process does to itself, see `child`. cache: of compiled programs, which shortens a trial."""
        entry = [str(Path(__file__).resolve()), inside] if inside else ["main.py"]
        flags = [f"--config={self.scratch}/config.py", f"--workdir={self.workdir}", f"--config.train.watchdog={watchdog}"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        environ["JAX_PLATFORMS"] = "cpu"
        if cache:
            environ |= dict(JAX_COMPILATION_CACHE_DIR=str(self.scratch / "cache"))
            environ |= dict(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")
        self.children, port = [], free_port()
        for i in range(self.processes):
            several = [f"--coordinator=127.0.0.1:{port}", f"--processes={self.processes}", f"--process={i}"]
            command = [sys.executable, *entry, "train", *flags, *(several if self.processes > 1 else [])]
            output = open(self._log(i), "w")  # noqa: SIM115
            self.children.append(subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT))
            output.close()

    def _log(self, process: int) -> Path:
        return self.scratch / f"{self.workdir.parent.name}.{self.workdir.name}.{process}.log"

    def text(self, process: int = 0) -> str:
        return self._log(process).read_text(errors="replace")

    def running(self) -> bool:
        return all(child.poll() is None for child in self.children)

    def until(self, condition) -> bool:
        """Wait for a condition; False when a process ended before."""
        limit = time.monotonic() + LIMIT
        while self.running() and time.monotonic() < limit:
            if condition():
                return True
            time.sleep(0.002)
        return False

    def wait(self) -> list[int]:
        """The exit codes; what does not end within LIMIT is killed."""
        limit = time.monotonic() + LIMIT
        for child in self.children:
            try:
                child.wait(max(1.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        return [child.returncode for child in self.children]

    def kill(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        self.wait()

    # what the files of the run say
    def steps_done(self) -> int:
        return max((line["step"] for line in read_jsonl(self.workdir / METRICS) if "lr" in line), default=0)

    def kind(self) -> str:
        lines = read(self.workdir)
        return lines[-1]["kind"] if lines else "start"

    def saved(self) -> list[int]:
        return step_folders(self.workdir / CHECKPOINTS)

    def saving(self) -> list[int]:
        """The step of a save that is not committed."""
        found = (self.workdir / CHECKPOINTS).glob(f"*{UNFINISHED}")
        return [int(path.name.removesuffix(UNFINISHED)) for path in found]

    def resumed_from(self) -> int:
        found = re.search(r"^resuming from step (\d+)|is finished: step (\d+) of", self.text(), re.MULTILINE)
        return int(found[1] or found[2]) if found else 0

    def records(self) -> list[dict]:
        times = ("step_time_s", "tokens_per_s", "mfu")
        lines = read_jsonl(self.workdir / METRICS)
        return [{name: value for name, value in line.items() if name not in times} for line in lines]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Campaign:
    """Trials and what came of them."""

    def __init__(self, scratch: Path, seed: int, several: bool):
        self.scratch, self.random = scratch, random.Random(seed)
        (scratch / "config.py").write_text(CONFIG)
        self.wanted, self.phases, self.faults = {}, Counter(), Counter()
        self.trials, self.survived, self.most_lost, self.number = 0, 0, 0, itertools.count()
        for processes in (1, 2) if several else (1,):  # fills the cache of compiled programs, too
            job = Job(scratch, scratch / f"undisturbed{processes}", processes)
            began = time.monotonic()
            job.start()
            if any(job.wait()):
                raise SystemExit(f"the undisturbed run with {processes} processes failed:\n{job.text()}")
            self.wanted[processes] = job.records()
            print(f"undisturbed, {processes} processes: {time.monotonic() - began:.0f} s", flush=True)
        lines = read(scratch / "undisturbed1")
        self.compiling = next(b["run_s"] - a["run_s"] for a, b in itertools.pairwise(lines) if a["kind"] == "compile")

    def trial(self, fault: str) -> None:
        """One fault in a new run, and the end of that run; another time when the run was over before the fault came."""
        while not self._trial(fault):
            pass

    def _trial(self, fault: str) -> bool:
        folder, problem = self.scratch / f"trial{next(self.number)}", ""
        job = Job(self.scratch, folder / "run", 2 if fault == "two processes" else 1)
        folder.mkdir()
        mounted, began = False, time.monotonic()
        if fault == "full disk":
            mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
            mounted = subprocess.run(mount, capture_output=True).returncode == 0
        try:
            kind, _, where = fault.partition(" ")
            if kind == "kill":
                problem, phase = self._kill(job, where)
            else:
                problem, phase = getattr(self, "_" + fault.replace(" ", "_"))(job), fault
            if problem is None:
                return False
            done, saving, damaged = job.steps_done(), job.saving(), fault in ("flipped", "truncated")
            codes, first = [], None
            while not codes or (any(codes) and len(codes) < 4):  # 75 and the like: start again
                job.start(watchdog=5 if fault == "stalled" else -1)
                codes.append(max(job.wait(), key=abs))
                first = job.resumed_from() if first is None else first
            lost = done - first
            allowed = EVERY + (done - min(saving) if saving else 0) + (EVERY if damaged else 0)
            if codes[-1]:
                problem = problem or f"exit code {codes[-1]}: {job.text()[-500:]}"
            elif job.records() != self.wanted[job.processes]:
                problem = problem or "the metrics are not those of the undisturbed run"
            elif lost > allowed:
                problem = problem or f"{lost} steps lost, {allowed} allowed"
        finally:
            job.kill()
            if mounted:
                subprocess.run(["umount", str(folder)], check=True)
        self.trials += 1
        self.faults["kill" if kind == "kill" else fault] += 1
        self.most_lost = max(self.most_lost, lost)
        self.survived += not problem
        if kind == "kill":
            self.phases[phase] += 1
        result = f"NOT survived: {problem}" if problem else f"survived, at step {done}, {lost} steps lost"
        print(f"{self.trials:3}  {fault:20}{phase:14}{result}  ({time.monotonic() - began:.0f} s)", flush=True)
        if not problem:
            shutil.rmtree(folder)
        return True

    def _kill(self, job: Job, where: str) -> tuple[str | None, str]:
        """(problem, or None when the run was over; the phase that the kill fell into)."""
        pick = self.random
        if "rename" in where:
            job.start(inside=f"{where.replace(' ', '-')}:{pick.randrange(1, STEPS // EVERY + 1)}")
            return ("" if job.wait() == [-signal.SIGKILL] else "it was to kill itself"), "save"
        job.start(cache=where != "compile")
        number, step = pick.randrange(1, STEPS // EVERY + 1), pick.randrange(1, STEPS - 1)
        condition, delay = {
            "start": (lambda: True, pick.uniform(0, 6)),
            "compile": (lambda: job.kind() == "compile", pick.uniform(0, self.compiling)),
            "steps": (lambda: job.steps_done() >= step, pick.uniform(0, 0.2)),
            "evaluation": (lambda: job.kind() == "evaluation", pick.uniform(0, 0.05)),
            "save": (lambda: any(at >= number * EVERY for at in job.saving()), pick.uniform(0, 0.1)),
        }[where]
        reached = job.until(condition)
        time.sleep(delay)
        reached = reached and job.running()
        job.kill()
        return ("" if reached else None), ("save" if job.saving() else job.kind())

    def _damage(self, job: Job, change) -> str | None:
        """Kill the run after some checkpoints and change a file of the newest."""
        step = self.random.randrange(2 * EVERY, STEPS - 1)
        job.start()
        reached = job.until(lambda: job.steps_done() >= step and len(job.saved()) > 1)
        job.kill()
        if not reached:
            return None
        newest = job.workdir / CHECKPOINTS / str(max(job.saved())) / "state"
        path = self.random.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
        content = bytearray(path.read_bytes())
        path.write_bytes(change(content))
        return ""

    def _truncated(self, job: Job) -> str | None:
        return self._damage(job, lambda content: content[: self.random.randrange(len(content))])

    def _flipped(self, job: Job) -> str | None:
        def flip(content):
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            return content

        return self._damage(job, flip)

    def _full_disk(self, job: Job) -> str | None:
        step = self.random.randrange(EVERY + 1, STEPS - EVERY)
        ballast = job.workdir.parent / "ballast"
        job.start()
        if not job.until(lambda: job.steps_done() >= step and job.saved()):
            job.kill()
            return None
        if os.path.ismount(job.workdir.parent):
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        else:
            resource.prlimit(job.children[0].pid, resource.RLIMIT_FSIZE, (4096, 4096))
        (code,) = job.wait()
        ballast.unlink(missing_ok=True)
        text = job.text()
        return "" if code == 1 and "error: " in text and "Traceback" not in text else f"exit code {code}: {text[-500:]}"

    def _stalled(self, job: Job) -> str:
        job.start(inside=f"stall:{self.random.randrange(3, STEPS)}", watchdog=5)
        (code,) = job.wait()
        return "" if code == 70 and "Thread" in job.text() else f"exit code {code}: {job.text()[-500:]}"

    def _two_processes(self, job: Job) -> str | None:
        step = self.random.randrange(0, STEPS - 2)
        job.start()
        reached = job.until(lambda: job.steps_done() >= step and job.kind() in ("compile", "steps", "evaluation", "save"))
        if not reached:
            return None
        self.random.choice(job.children).terminate()
        codes = job.wait()
        if codes == [75, 75] and max(job.saved()) == job.steps_done() and not job.saving():
            return ""
        return None if codes == [0, 0] else f"exit codes {codes}, saved {job.saved()}, done {job.steps_done()}"


def child(inside: str) -> None:
    """In the training process: kill it at the N-th final rename of a save, or stall it at a step; then run the command."""
    what, _, number = inside.partition(":")
    calls = []
    if what == "stall":
        from llm.data.corpus import Corpus

        batch = Corpus.batch

        def stall(self, seed, step, *args, **options):
            if step == int(number):
                threading.Event().wait()
            return batch(self, seed, step, *args, **options)

        Corpus.batch = stall
    else:
        rename = os.rename

        def last(source, target, **options):
            commits = str(source).endswith(UNFINISHED) and Path(source).parent.name == CHECKPOINTS
            calls.extend([0] * commits)
            dies = commits and len(calls) == int(number)
            if dies and what == "before-rename":
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target, **options)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)

        os.rename = last
    sys.argv = [str(ROOT / "main.py"), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="", help="only these: NAME,NAME; default: all in turn")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    options = parser.parse_args()
    plan = tuple(name for name in options.faults.split(",") if name) or PLAN
    if unknown := set(plan) - set(PLAN):
        parser.error(f"--faults={','.join(sorted(unknown))}: there are {', '.join(sorted(set(PLAN)))}")
    scratch = Path(tempfile.mkdtemp(prefix="faults"))
    campaign = Campaign(scratch, options.seed, "two processes" in plan)
    short = lambda: [phase for phase in ("save", "compile") if campaign.phases[phase] < FEWEST]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(campaign.trial, (plan * (options.trials // len(plan) + 1))[: options.trials]))
    while plan == PLAN and options.trials >= len(PLAN) and short():
        campaign.trial(f"kill {short()[0]}")
    if campaign.survived == campaign.trials:
        shutil.rmtree(scratch)
    else:
        print(f"what did not survive is in {scratch}")
    print(
        json.dumps(
            dict(
                trials=campaign.trials,
                survived=campaign.survived,
                by_phase=dict(campaign.phases),
                by_fault=dict(campaign.faults),
                max_steps_lost=campaign.most_lost,
                checkpoint_every=EVERY,
            )
        )
    )
    return 0 if campaign.survived == campaign.trials else 1


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2] == "train":
        child(sys.argv[1])
    sys.exit(main())
