"""Starts the processes of a job on this machine, each with a time limit, and leaves none behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 400.0  # seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(*arguments: str) -> subprocess.CompletedProcess:
    """One command of main.py, until it ends."""
    return subprocess.run([sys.executable, "main.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


@dataclass
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str
    seconds: float  # since the start of the job


class Running:
    """The processes of a job, or of any other command, while they run."""

    def __init__(self, commands: Sequence[Sequence[str]], folder: Path, limit: float):
        self.folder, self.began, self.limit = folder, time.monotonic(), limit
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        self.children = []
        for number, command in enumerate(commands):
            with open(folder / f"{number}.out", "w") as out, open(folder / f"{number}.err", "w") as err:
                pipes = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=err)
                child = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
            self.children.append(child)

    def signal(self, number: int, process: int) -> None:
        self.children[process].send_signal(number)

    def wait_until(self, condition) -> None:
        """Until condition() is true. Fails when it is not in time, or when a process ends before."""
        while not condition():
            assert all(child.poll() is None for child in self.children), self.output()
            assert time.monotonic() - self.began < self.limit, self.output()
            time.sleep(0.1)

    def wait(self) -> list[Ended]:
        """Until all have ended. Fails when they have not in time."""
        ended: list[Ended | None] = [None] * len(self.children)
        while None in ended:
            for i, child in enumerate(self.children):
                if ended[i] is None and child.poll() is not None:
                    seconds = time.monotonic() - self.began
                    ended[i] = Ended(child.returncode, self._read(f"{i}.out"), self._read(f"{i}.err"), seconds)
            assert time.monotonic() - self.began < self.limit, self.output()
            time.sleep(0.05)
        return [process for process in ended if process]

    def output(self) -> str:
        """What all processes have written to stderr."""
        return "\n".join(f"process {i}:\n{self._read(f'{i}.err')[-4000:]}" for i in range(len(self.children)))

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]], folder: Path, limit: float = LIMIT) -> Iterator[Running]:
    """Starts one process for each command; afterwards all of them, and what they started, are gone."""
    job = Running(commands, folder, limit)
    try:
        yield job
    finally:
        for child in job.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def job(count: int, *arguments: str, program: str = "main.py") -> list[list[str]]:
    """The commands of a job of `count` processes: python PROGRAM ARGUMENTS and the flags that say which one each is."""
    flags = [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={count}"] if count > 1 else []
    which = lambda i: [*flags, f"--process={i}"] if flags else []
    return [[sys.executable, program, *arguments, *which(i)] for i in range(count)]
