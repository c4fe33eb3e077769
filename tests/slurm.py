"""A Slurm of its own, with one node and daemons of its own in a temporary folder."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.jobs import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CONFIGURATION = """
ClusterName=convoy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=10
InactiveLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


def missing() -> str | None:
    """Why Slurm cannot be started here, or None."""
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=path())]
    if lacking:
        return f"{', '.join(lacking)} is not installed (Debian: slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "slurmd starts jobs as root only"


class NotStarted(Exception):
    """The daemons do not run here; says why."""


class Slurm:
    """A running cluster; `environment` makes the commands of Slurm talk to it."""

    def __init__(self, folder: Path):
        self.folder, self.host = folder, socket.gethostname().partition(".")[0]
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path()}
        self.daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        """Until the node waits for jobs. Raises NotStarted."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        ports = dict(control=free_port(), node=free_port())
        facts = dict(host=self.host, folder=self.folder, user="root", cpus=os.cpu_count(), **ports)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**facts))
        own = {f"--{name}-file": self.folder / f"munge.{name}" for name in ("key", "log", "pid", "seed")}
        own["--socket"] = self.folder / "munge.socket"
        self._daemon("munged", "--foreground", "--force", *(f"{flag}={value}" for flag, value in own.items()))
        self._until((self.folder / "munge.socket").exists, "munged")
        self._daemon("slurmctld", "-D", "-i")
        self._daemon("slurmd", "-D", "-N", self.host)
        self._until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"), "slurmctld and slurmd")

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "w") as out:
            child = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.daemons.append(child)

    def _until(self, condition, what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or any(child.poll() is not None for child in self.daemons):
                texts = [f"{file.name}: {file.read_text()[-600:]}" for file in self.folder.glob("*.out")]
                raise NotStarted(f"{what} cannot be started: {'; '.join(texts)}")
            time.sleep(0.2)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Standard output of a command of Slurm, or "" when it fails."""
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else ""

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job, such as JobState, ExitCode and Restarts."""
        return dict(part.split("=", 1) for part in self.run("scontrol", "show", "job", number).split() if "=" in part)

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        self.run("scancel", "--user=root")
        self.run("scontrol", "shutdown")
        time.sleep(1.0)
        for child in reversed(self.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
