"""Which process of a job this is, how processes meet, and where devices of several nodes go."""

import dataclasses
import itertools
import json
import math
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from parallel import distributed, rendezvous
from parallel.axes import AXES
from parallel.distributed import Job, find, first_host
from parallel.errors import UserError
from parallel.mesh import arrange, crossing

ROOT = Path(__file__).resolve().parents[2]
SRUN = dict(
    SLURM_JOB_ID="71",
    SLURM_STEP_ID="2",
    SLURM_STEP_NODELIST="gpu[007-008]",
    SLURM_STEP_NUM_TASKS="4",
    SLURM_STEP_TASKS_PER_NODE="2(x2)",
    SLURM_NODEID="1",
    SLURM_PROCID="3",
    SLURM_LOCALID="1",
)
MPIRUN = dict(
    OMPI_COMM_WORLD_SIZE="4",
    OMPI_COMM_WORLD_RANK="2",
    OMPI_COMM_WORLD_LOCAL_RANK="0",
    OMPI_COMM_WORLD_LOCAL_SIZE="2",
    OMPI_MCA_orte_hnp_uri="1184104448.0;tcp://10.0.0.4,192.168.0.4:58783;tcp6://[fd00::2]:40747",
    PMIX_NAMESPACE="1184104449",
)
POD = dict(KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX="5", JAX_NUM_PROCESSES="8", HOSTNAME="run-nodes-0-5")
FLAGS = dict(coordinator="a:9", processes=2, process=1)


def pod(monkeypatch, name):
    monkeypatch.setattr(socket, "getfqdn", lambda _: name)
    return find(environ=POD)


@pytest.mark.smoke
def test_launchers_are_recognised(monkeypatch):
    job = find(environ=SRUN)
    assert (job.launcher, job.processes, job.process, job.local) == ("Slurm", 4, 3, (1, 2))
    host, port = job.address.split(":")
    assert host == "gpu007" and 61440 <= int(port) < 65536
    assert find(environ=SRUN | {"SLURM_STEP_ID": "3"}).address != job.address
    job = find(environ=MPIRUN)
    assert (job.launcher, job.processes, job.process, job.local) == ("Open MPI", 4, 2, (0, 2))
    assert job.address.startswith("10.0.0.4:")
    assert find(environ=MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).address.startswith("127.0.0.1:")
    assert find(environ=SRUN | MPIRUN).launcher == "Open MPI"  # mpirun starts its helpers with srun
    job = pod(monkeypatch, "run-nodes-0-5.run.default.svc.cluster.local")
    assert (job.launcher, job.processes, job.process) == ("Kubernetes", 8, 5)
    assert job.address == "run-nodes-0-0.run.default.svc.cluster.local:61400"


@pytest.mark.smoke
def test_one_process_is_no_job(monkeypatch):
    batch_script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert find(environ={}) is None and find(environ=batch_script) is None
    assert find(environ=SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find(processes=1, environ={}) is None
    assert find(environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


@pytest.mark.smoke
def test_flags_go_before_variables_and_those_before_the_launcher():
    assert find(**FLAGS, environ={}) == Job(2, 1, "a:9")
    named = dict(JAX_COORDINATOR_ADDRESS="b:8", JAX_NUM_PROCESSES="4", JAX_PROCESS_ID="0")
    assert find(environ=named) == Job(4, 0, "b:8")
    assert find(**FLAGS, environ=named) == Job(2, 1, "a:9")
    assert find(environ=MPIRUN | {"JAX_COORDINATOR_ADDRESS": "b:8"}).address == "b:8"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (dict(FLAGS, process=-1), {}, "--process=I is missing"),
        (dict(FLAGS, coordinator=""), {}, "--coordinator=HOST:PORT is missing"),
        (dict(FLAGS, processes=0), {}, "--processes=N is missing"),
        (dict(FLAGS, process=2), {}, "--process=2 with --processes=2"),
        (dict(FLAGS, process=-3), {}, "--process=-3"),
        (dict(FLAGS, coordinator="a"), {}, "expected HOST:PORT"),
        (dict(FLAGS, coordinator="a:99999"), {}, "expected HOST:PORT"),
        ({}, {"JAX_NUM_PROCESSES": "many"}, "JAX_NUM_PROCESSES=many"),
        ({}, {k: v for k, v in MPIRUN.items() if k != "OMPI_MCA_orte_hnp_uri"}, "Open MPI does not say it"),
    ],
)
def test_half_a_job_is_refused(flags, environ, words):
    with pytest.raises(UserError) as error:
        find(**flags, environ=environ)
    assert words in str(error.value)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[001-004,007],other", "node001"),
        ("rack[2-3]n[07-09]", "rack2n07"),
    ],
)
def test_the_first_machine_of_a_list(names, first):
    assert first_host(names) == first


# --------------------------------------------------------------------------------------------------- meeting
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(number, process, processes=2, limit=20.0):
    return rendezvous.meet(f"127.0.0.1:{number}", processes, process, dict(host=f"h{process}"), limit)


@pytest.mark.smoke
@pytest.mark.parametrize("process", [0, 1])
def test_who_does_not_come_is_named_after_the_time_limit(process):
    words = {0: "only 1 of 2 processes came .* missing: 1", 1: "process 1 of 2 cannot reach the coordinator"}
    with pytest.raises(ConnectionError, match=words[process]):
        meet(port(), process, limit=0.3)


@pytest.mark.smoke
def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConnectionError, match="another program uses it"):
        meet(taken.getsockname()[1], 0)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("process", "processes", "words"), [(1, 3, "one of 3 processes, process 0 as one of 2"), (0, 2, "process 0, as another")]
)
def test_processes_that_do_not_fit_together_are_refused(process, processes, words):
    number, answers = port(), []

    def guest():
        with socket.create_connection(("127.0.0.1", number)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # is let go and changes nothing
            stranger.recv(1)
        with socket.create_connection(("127.0.0.1", number)) as stranger:
            stranger.sendall(b'{"process": "one", "processes": 2, "host": ""}\n')
            stranger.recv(1)
        with socket.create_connection(("127.0.0.1", number)) as connection:
            connection.sendall(json.dumps(dict(process=process, processes=processes, host="h1")).encode() + b"\n")
            answers.append(json.loads(connection.makefile().readline()))

    thread = threading.Thread(target=guest)
    waiting = threading.Timer(0.3, thread.start)
    waiting.start()
    with pytest.raises(ConnectionError, match=words) as error:
        meet(number, 0)
    thread.join(10)
    assert answers == [dict(problem=str(error.value))]


PROCESS = """
import sys, time
from parallel import rendezvous
rendezvous.HEARTBEAT, rendezvous.BEAT = 1.5, 0.2
address, process, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
meeting = rendezvous.meet(address, 3, process, dict(host=f"h{process}"), 30.0)
print(meeting.address, [fact["host"] for fact in meeting.facts], flush=True)
time.sleep(0.5)
if how == "leave":
    meeting.leave(0)
elif how == "fail":
    meeting.leave(4)
elif how == "hang":
    import os, signal
    os.kill(os.getpid(), signal.SIGSTOP)
elif how == "wait":
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("hows", "code", "words"),
    [
        (("wait", "wait", "end"), 1, "process 2 of 3 (h2) has ended without a word"),
        (("end", "wait", "wait"), 1, "process 0 of 3 (h0) has ended without a word"),
        (("wait", "fail", "wait"), 4, "process 1 of 3 (h1) has failed with exit code 4"),
        (("wait", "hang", "wait"), 1, "process 1 of 3 (h1) has not answered"),
        (("leave", "leave", "leave"), 0, ""),
    ],
    ids=["lost", "lost-0", "failed", "hangs", "done"],
)
def test_what_happens_to_one_process_ends_all(hows, code, words):
    address = f"127.0.0.1:{port()}"
    commands = [[sys.executable, "-c", PROCESS, address, str(i), how] for i, how in enumerate(hows)]
    pipes = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        for child, how in zip(children, hows):
            if how == "hang":
                continue
            out, err = child.communicate(timeout=30)
            assert out.splitlines()[0].endswith("['h0', 'h1', 'h2']")
            assert child.returncode == (code if how in ("wait", "leave") else 0), err
            assert err == "" if how != "wait" else words in err
    finally:
        for child in children:
            child.kill()
            child.wait()


# --------------------------------------------------------------------------------------------------- where devices go
@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    platform: str = "gpu"


def placed(nodes: int, size: int, **sizes: int) -> np.ndarray:
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    order = arrange(shape, [i // size for i in range(nodes * size)])
    assert sorted(order.flat) == list(range(nodes * size))
    return order.reshape([n for n in order.shape if n > 1])


@pytest.mark.smoke
def test_a_single_node_keeps_its_order():
    assert placed(1, 8, data=2, pipe=2, tensor=2).ravel().tolist() == list(range(8))


@pytest.mark.smoke
def test_a_node_takes_tensor_first_then_data_and_pipe_goes_across():
    order_DPT = placed(2, 4, data=2, pipe=2, tensor=2)
    assert (order_DPT // 4 == np.array([0, 1])[None, :, None]).all()  # a stage is on one node, so no node has the whole model
    assert placed(4, 8, data=4, pipe=2, tensor=4).shape == (4, 2, 4)
    assert placed(2, 4, pipe=8)[:4].tolist() == [0, 1, 2, 3]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("nodes", "size", "sizes"),
    [
        (2, 4, dict(pipe=4, tensor=2)),
        (4, 8, dict(pipe=16, tensor=2)),
        (4, 8, dict(data=4, pipe=8)),
        (8, 8, dict(data=8, pipe=4, tensor=2)),
        (6, 8, dict(replica=3, data=2, pipe=2, tensor=4)),
        (4, 8, dict(data=32)),
    ],
)
def test_rings_cross_nodes_between_devices_of_the_same_place(nodes, size, sizes):
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    order = arrange(shape, [i // size for i in range(nodes * size)])
    assert crossing(shape, (order // size).ravel()) is None
    along = np.moveaxis(order, AXES.index("pipe"), -1).reshape(-1, shape["pipe"])
    hops = [(a, b) for ring in along for a, b in itertools.pairwise(ring) if a // size != b // size]
    assert all(a % size == b % size for a, b in hops)
    across = np.moveaxis(order, AXES.index("data"), -1).reshape(-1, shape["data"])
    places = [[set((ring[ring // size == node] % size).tolist()) for node in set(ring // size)] for ring in across]
    assert all(set(map(frozenset, ring)) == {frozenset(ring[0])} for ring in places)  # the same places on each of its nodes


@pytest.mark.smoke
def test_tensor_across_nodes_is_said():
    sizes = dict(tensor=16)
    text = crossing(sizes, [i // 8 for i in range(16)])
    assert "mesh.tensor=16 goes across nodes of 8 devices in 1 of its 1 groups" in text
    assert crossing(dict(tensor=8), [i // 8 for i in range(16)]) is None
    order = placed(2, 3, tensor=2, data=3)  # 3 devices a node: one group is torn
    assert "in 1 of its 3 groups" in crossing(dict(tensor=2), order.ravel() // 3)


@pytest.mark.smoke
def test_a_node_is_a_machine_of_gpus_or_a_process_of_virtual_devices(monkeypatch):
    devices = [Device(process) for process in range(4) for _ in range(2)]
    assert distributed.nodes(devices) == [0, 0, 1, 1, 2, 2, 3, 3]
    monkeypatch.setattr(distributed, "facts", lambda: [dict(machine=name) for name in "abab"])
    assert distributed.nodes(devices) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert distributed.nodes([Device(i, "cpu") for i in range(4)]) == [0, 1, 2, 3]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("local", "visible", "own"),
    [((0, 1), "0,1,2,3", None), ((1, 4), "0,1,2,3", [1]), ((1, 2), "0,1,2,3", [2, 3]), ((3, 8), "5", None)],
)
def test_processes_of_one_machine_share_out_its_gpus(local, visible, own):
    assert distributed._own_gpus(local, dict(CUDA_VISIBLE_DEVICES=visible)) == own


def test_one_process_agrees_with_itself():
    assert distributed.any_process(True) and not distributed.any_process(False)
    assert distributed.gather({"a": 1}) == [{"a": 1}] and distributed.from_first(math.pi) == math.pi
    assert distributed.leave(3) == 3 and distributed.is_first() and distributed.count() == 1
