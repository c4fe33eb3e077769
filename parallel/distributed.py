"""The processes of a job: how a launcher says which one this is, how they start and end together, what they agree on.

`find` reads flags and the environment, `join` brings the processes together before jax touches a device, and `leave` ends
them. The rest needs no `join`: with one process it answers without any communication. Everything that communicates must be
called by all processes in the same order, from the main thread."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import STOPPED, CheckError, UserError
from parallel.rendezvous import HEARTBEAT, Meeting, meet

FIRST_PORT, PORTS = 61440, 4096  # above the ports that Linux gives to outgoing connections
VARIABLES = dict(JAX_COORDINATOR_ADDRESS="address", JAX_NUM_PROCESSES="processes", JAX_PROCESS_ID="process")
FLAGS = dict(address="--coordinator=HOST:PORT", processes="--processes=N", process="--process=I")
UNSAID = dict(address="", processes=0, process=-1)
KUBERNETES_PORT = 61400


@dataclasses.dataclass(frozen=True)
class Job:
    """Which process of how many this is. address: host:port where process 0 waits for the others.

    local: the number of this process on its machine and how many there are on it, (0, 1) when the launcher does not say."""

    processes: int
    process: int
    address: str
    launcher: str = "flags"
    local: tuple[int, int] = (0, 1)


_meeting: Meeting | None = None
_stdout: Any = None
_all_alike = False


# --------------------------------------------------------------------------------------------------- which process is this
def find(coordinator: str = "", processes: int = 0, process: int = -1, environ: Mapping[str, str] = os.environ) -> Job | None:
    """The job of this process, or None when it is alone.

    Each fact comes from the arguments, else from VARIABLES, else from Open MPI, Slurm or Kubernetes. Raises UserError when
    only some of them are known, or they cannot be."""
    facts = next((facts for launcher in (_open_mpi, _slurm, _kubernetes) if (facts := launcher(environ))), {})
    for name, fact in VARIABLES.items():
        if text := environ.get(name):
            facts[fact] = text if fact == "address" else _number(name, text)
    own = dict(address=coordinator, processes=processes, process=process)
    facts |= {fact: value for fact, value in own.items() if value != UNSAID[fact]}
    if not facts or (facts.get("processes") == 1 and facts.get("process", 0) == 0):
        return None
    missing = [FLAGS[fact] for fact in FLAGS if fact not in facts]
    if missing:
        who = f"{facts['launcher']} does not say it" if "launcher" in facts else "without any of them there is one process"
        raise UserError(f"several processes need {', '.join(FLAGS.values())}; of these {', '.join(missing)} is missing: {who}")
    job = Job(**facts)
    if job.processes < 1 or not 0 <= job.process < job.processes:
        raise UserError(f"--process={job.process} with --processes={job.processes}: processes count from 0 to N - 1")
    host, _, port = job.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--coordinator={job.address}: expected HOST:PORT of process 0, such as node-1:{KUBERNETES_PORT}")
    return job


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{name}={text}: expected a number that is not negative")
    return int(text)


def _port(job: str) -> int:
    """A port that all processes of a job know and another job on the same machine hardly has."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _open_mpi(environ: Mapping[str, str]) -> dict[str, Any]:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return {}
    count, local = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    facts: dict[str, Any] = dict(launcher="Open MPI", processes=count, process=int(environ["OMPI_COMM_WORLD_RANK"]))
    facts["local"] = (int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), local)
    starter = re.search(r"tcp://([^,:;]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))  # version 5 does not say
    port = _port(environ.get("PMIX_NAMESPACE", "") + environ.get("OMPI_MCA_ess_base_jobid", ""))
    if local == count:
        facts["address"] = f"127.0.0.1:{port}"
    elif starter:  # mpirun puts rank 0 on its own machine unless its host list begins with another one
        facts["address"] = f"{starter[1]}:{port}"
    return facts


def _slurm(environ: Mapping[str, str]) -> dict[str, Any]:
    """Inside `srun`; a batch script itself is one process."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return {}
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")  # "8(x2),4": of every node
    nodes = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))]
    node, step = int(environ.get("SLURM_NODEID", 0)), f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return dict(
        launcher="Slurm",
        processes=int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]),
        process=int(environ["SLURM_PROCID"]),
        address=f"{first_host(environ['SLURM_STEP_NODELIST'])}:{_port(step)}",
        local=(int(environ.get("SLURM_LOCALID", 0)), nodes[node] if node < len(nodes) else 1),
    )


def first_host(names: str) -> str:
    """The first machine of a Slurm list such as `rack[2-3]n[07-09,12],other`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", names)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else names


def _kubernetes(environ: Mapping[str, str]) -> dict[str, Any]:
    """A pod of an indexed Job, alone or in a JobSet; the manifest gives the number of pods in JAX_NUM_PROCESSES."""
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return {}
    index = environ["JOB_COMPLETION_INDEX"]
    facts: dict[str, Any] = dict(launcher="Kubernetes", process=int(index))
    name, dot, domain = socket.getfqdn(environ.get("HOSTNAME", "")).partition(".")  # a pod is called JOB-INDEX
    if dot and name.endswith(f"-{index}"):
        facts["address"] = f"{name.removesuffix(index)}0.{domain}:{KUBERNETES_PORT}"
    return facts if "JAX_NUM_PROCESSES" in environ else {}


# --------------------------------------------------------------------------------------------------- together
def join(job: Job, limit: float = 120.0, **alike: str) -> None:
    """Bring the processes of a job together, before jax makes its devices; only process 0 keeps its standard output.

    limit: seconds to wait for the others. alike: facts that must be the same in all processes. From now on a process that
    ends early takes the others down: at once when it is killed or fails, after HEARTBEAT seconds when it stops answering.
    Raises ConnectionError in one sentence, UserError when a fact differs."""
    meet_others(job, limit, alike)
    for name in ("jax", *alike):
        for process in differing(name):
            raise UserError(
                f"{_meeting.name(process)} has another {name} than process 0: "
                f"{facts()[process].get(name)} and {facts()[0].get(name)}; start all processes alike"
            )
    start_jax(job)


def meet_others(job: Job, limit: float, own: dict[str, Any]) -> None:
    """The first half of `join`: all processes meet, and each knows the `facts` of all; own: more of this one, plain JSON."""
    global _meeting
    import jax

    base = dict(host=socket.gethostname(), machine=_machine(), jax=jax.__version__)
    _meeting = meet(job.address, job.processes, job.process, base | own, limit)
    if job.process:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if _stdout:
            os.dup2(sys.stdout.fileno(), _stdout.fileno())


def start_jax(job: Job) -> None:
    """The second half of `join`: jax gets the devices of all processes."""
    import jax

    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in os.environ):
        os.environ.setdefault("no_grpc_proxy", _meeting.address.rpartition(":")[0])  # the others are no web servers
    jax.distributed.initialize(
        _meeting.address,
        job.processes,
        job.process,
        local_device_ids=_own_gpus(job.local, os.environ),
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=int(HEARTBEAT),
    )
    _default_signals()


def own_stdout() -> None:
    """Keep standard output for what this program prints; what libraries write there themselves (Gloo does) goes to stderr."""
    global _stdout
    _stdout = sys.stdout = open(os.dup(1), "w", buffering=1, encoding=sys.stdout.encoding)  # noqa: SIM115
    os.dup2(2, 1)


def _default_signals() -> None:
    """jax.distributed has put a handler of its own under Python's; a signal before training begins ends the process."""
    import signal
    import threading

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def _machine() -> str:
    """What processes on one machine have in common."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _own_gpus(local: tuple[int, int], environ: Mapping[str, str]) -> list[int] | None:
    """This process's share of the visible GPUs of its machine; None (all that it sees) unless it can share them out."""
    index, count = local
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(visible.split(",")) if visible else len(list(Path("/dev").glob("nvidia[0-9]*")))
    if count == 1 or gpus < count or gpus % count:
        return None
    return list(range(index * gpus // count, (index + 1) * gpus // count))


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Around all work after `join`: what fails because another process is gone gives way to the sentence that says so."""
    try:
        yield
    except (UserError, CheckError):
        raise
    except Exception:
        if _meeting:
            time.sleep(5.0)
        raise


def leave(code: int) -> int:
    """End this process of the job with the exit code of its command; returns the code."""
    if _meeting is None:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (0, STOPPED) or _all_alike:  # with these all processes end
        import jax

        _meeting.leave(0)
        jax.distributed.shutdown()  # waits for the others
        return code
    _meeting.leave(code)
    os._exit(code)  # without the wait for the others, who are in the middle of something


def all_end_alike() -> None:
    """From here on all processes end in good order with the same exit code, whatever it is."""
    global _all_alike
    _all_alike = True


# --------------------------------------------------------------------------------------------------- what they agree on
def count() -> int:
    """Number of processes."""
    import jax

    return jax.process_count()


def is_first() -> bool:
    """Whether this is process 0, which prints and writes what is written once."""
    import jax

    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in any process."""
    return bool(_asked(flag))


class AnyProcess:
    """`any_process` that does not wait: asks, and answers what was asked the time before (with one process: this time)."""

    def __init__(self):
        self.before: Any = False

    def ask(self, flag: bool) -> bool:
        before, self.before = self.before, _asked(flag)
        return bool(self.before if count() == 1 else before)


def _asked(flag: bool) -> Any:
    """Whether `flag` is true in any process, as a number that is on its way."""
    if count() == 1:
        return flag
    import jax
    import numpy as np

    largest, each = _largest()
    return largest(jax.make_array_from_callback((jax.device_count(),), each, lambda index: np.full(1, flag, np.int32)))


@functools.cache
def _largest() -> tuple[Any, Any]:
    """The jitted maximum over all devices, in all of them, and the sharding that gives each device one number."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), "all")
    whole, each = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("all"))
    return jax.jit(lambda numbers: numbers.max(), out_shardings=whole), each


def gather(value: Any) -> list[Any]:
    """The plain JSON value of every process, in order of the processes."""
    if count() == 1:
        return [value]
    import numpy as np
    from jax.experimental import multihost_utils

    text = json.dumps(value).encode()
    size = int(multihost_utils.process_allgather(np.asarray(len(text), np.int32)).max())
    padded = np.zeros(1 << max(6, size - 1).bit_length(), np.uint8)  # few sizes, so few programs
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(bytes(row).rstrip(b"\0")) for row in rows]


def from_first(value: Any) -> Any:
    """The plain JSON value of process 0, in every process."""
    return gather(value if is_first() else None)[0]


def barrier(name: str) -> None:
    """Wait until all processes are here."""
    if count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def first_goes_first(point: str) -> Iterator[None]:
    """The block runs in process 0 before it runs in the others, which find what that one has written, if after hours.

    point: a name that no other such block has."""
    wait, go = (_meeting.await_pass, _meeting.let_pass) if _meeting else (barrier, barrier)
    if not is_first():
        wait(point)
    yield
    if is_first():
        go(point)


def facts() -> list[dict[str, Any]]:
    """host, machine and what else is known of every process; empty for one that has not met others."""
    return _meeting.facts if _meeting else []


def differing(name: str) -> list[int]:
    """The processes for which this fact is not what it is for process 0."""
    return [i for i, fact in enumerate(facts()) if fact.get(name) != facts()[0].get(name)]


def nodes(devices: Sequence[Any]) -> list[int]:
    """The fast domain of each device, as a number: a machine for GPUs, a process for virtual CPU devices."""
    machines = [fact["machine"] for fact in facts()]
    order = list(dict.fromkeys(machines))
    known = devices[0].platform != "cpu" and machines
    return [order.index(machines[d.process_index]) if known else d.process_index for d in devices]
