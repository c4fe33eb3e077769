"""How the processes of a job find each other, and how each learns at once that another one has ended.

Process 0 waits at an address that all know. Each of the others opens one connection to it, says who it is, and keeps the
connection: over it go lines of JSON and, every BEAT seconds, an empty line. A connection that breaks, or that is silent for
HEARTBEAT seconds, means that the process behind it is lost; process 0 tells the others, and all end with one sentence.
"""

import collections
import contextlib
import errno
import json
import math
import os
import selectors
import socket
import sys
import threading
import time
from typing import Any

HEARTBEAT = 30.0  # seconds of silence after which a process counts as lost
BEAT = 5.0
LINGER = 2.0  # seconds that process 0 outlives the others: without its service, jax would abort them before they say why
LOCAL = ("127.0.0.1", "localhost")  # under these names no other machine can come
LINE = 1 << 16  # bytes of the longest greeting


class Meeting:
    """The connections of one process after all have met: `facts` of every process, `address` for the service of jax."""

    def __init__(self, process: int, peers: dict[int, socket.socket], welcome: dict[str, Any], begun: bytes = b""):
        self.process, self.peers, self.facts, self.address = process, peers, welcome["facts"], welcome["address"]
        self.heard = dict.fromkeys(peers, time.monotonic())
        self.buffers = dict.fromkeys(peers, b"")
        self.done: set[int] = set()
        self.passed: dict[str, threading.Event] = collections.defaultdict(threading.Event)
        self.lock = threading.Lock()
        threading.Thread(target=self._watch, args=(begun,), daemon=True, name="processes").start()

    def name(self, process: int) -> str:
        """A process for a reader."""
        return f"process {process} of {len(self.facts)} ({self.facts[process]['host']})"

    def leave(self, code: int) -> None:
        """Say that this process ends, in good order (code 0) or failed; what happens to its connections then is no loss."""
        self.done.update(self.peers)
        self._tell(dict(event="done" if code == 0 else "failed", process=self.process, code=code))
        if code and self.process == 0:
            time.sleep(LINGER)

    def let_pass(self, point: str) -> None:
        """Process 0: the others may pass this point."""
        self._tell(dict(event="passed", point=point))

    def await_pass(self, point: str) -> None:
        """Any other process: wait until process 0 lets it pass, however long that takes."""
        self.passed[point].wait()

    def _tell(self, message: dict[str, Any] | None) -> None:
        line = b"\n" if message is None else json.dumps(message).encode() + b"\n"
        for connection in self.peers.values():
            with contextlib.suppress(OSError), self.lock:
                connection.sendall(line)

    def _watch(self, begun: bytes) -> None:
        """begun: what a peer has sent with the welcome already."""
        selector = selectors.DefaultSelector()
        for peer, connection in self.peers.items():
            connection.settimeout(BEAT)
            selector.register(connection, selectors.EVENT_READ, peer)
            self._read(peer, begun)
        beaten = 0.0
        while True:
            if time.monotonic() - beaten >= BEAT:
                self._tell(None)
                beaten = time.monotonic()
            for key, _ in selector.select(BEAT):
                try:
                    data = key.fileobj.recv(4096)
                except OSError:
                    data = b""
                if not data:
                    selector.unregister(key.fileobj)
                    self._lost(key.data, "has ended without a word: it was killed, or its machine failed")
                    self.heard.pop(key.data)
                self._read(key.data, data)
            now = time.monotonic()
            for peer, heard in self.heard.items():
                if now - heard > HEARTBEAT:
                    self._lost(peer, f"has not answered for {HEARTBEAT:.0f} s: it hangs, or its machine or network failed")

    def _read(self, peer: int, data: bytes) -> None:
        if data:
            self.heard[peer] = time.monotonic()
        *lines, self.buffers[peer] = (self.buffers[peer] + data).split(b"\n")
        for line in filter(None, lines):
            message = json.loads(line)
            if message["event"] == "passed":
                self.passed[message["point"]].set()
            elif message["event"] == "done":
                self.done.add(peer)
            elif peer not in self.done:
                self._end(message)

    def _lost(self, peer: int, why: str) -> None:
        if peer not in self.done:
            self._end(dict(event="lost", process=peer, why=why, code=1))

    def _end(self, message: dict[str, Any]) -> None:
        """End this process because of another one, telling the rest."""
        if self.process == 0:
            self.done.update(self.peers)
            self._tell(message)
        if message["event"] == "failed":
            time.sleep(1.0)  # what is wrong there may be wrong here, and then this process says it itself
        why = message.get("why", f"has failed with exit code {message['code']}: its own output says why")
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        text = f"error: {self.name(message['process'])} {why}. Process {self.process} ends, too; what was saved stays.\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        if self.process == 0:
            time.sleep(LINGER)
        os._exit(message["code"] or 1)


def meet(address: str, processes: int, process: int, facts: dict[str, Any], limit: float) -> Meeting:
    """Meet the others within `limit` seconds. facts: what the others should know of this process, plain JSON with its host.

    Raises ConnectionError, in one sentence, when they do not come together."""
    host, _, port = address.rpartition(":")
    greeting = dict(facts, process=process, processes=processes)
    if process:
        return _arrive(host.strip("[]"), int(port), greeting, limit)
    return _wait(host, int(port), greeting, limit)


def _wait(host: str, port: int, greeting: dict[str, Any], limit: float) -> Meeting:
    """Process 0: wait for all others."""
    processes, deadline = greeting["processes"], time.monotonic() + limit
    arrived: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    try:
        server = _server("127.0.0.1" if host in LOCAL else "", port, processes)
    except OSError as error:
        why = "another program uses it" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConnectionError(f"process 0 cannot wait for the others at port {port}: {why}; choose another port") from error
    with server:
        while len(arrived) < processes - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [str(i) for i in range(1, processes) if i not in arrived]
                shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
                raise ConnectionError(
                    f"only {len(arrived) + 1} of {processes} processes came to {host}:{port} within {limit:.0f} s; missing: "
                    f"{shown}. Look at their output, start all of them, or allow more time with --join_timeout=S"
                )
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connection.settimeout(min(left, 5.0))
            guest, _ = _first_line(connection, LINE)
            if type(guest.get("process")) is not int or not {"processes", "host"} <= guest.keys():  # a stranger
                connection.close()
                continue
            problem = _problem(guest, processes, arrived)
            if problem:
                for other, _ in [(connection, None), *arrived.values()]:
                    with contextlib.suppress(OSError):
                        other.sendall(json.dumps(dict(problem=problem)).encode() + b"\n")
                raise ConnectionError(problem)
            arrived[guest["process"]] = (connection, guest)
    service = f"{host}:{_free_port()}"
    everyone = [greeting, *(arrived[i][1] for i in sorted(arrived))]
    welcome = dict(facts=everyone, address=service)
    line = json.dumps(welcome).encode() + b"\n"
    for connection, _ in arrived.values():
        connection.settimeout(30.0)
        connection.sendall(line)
    return Meeting(0, {i: connection for i, (connection, _) in arrived.items()}, welcome)


def _arrive(host: str, port: int, greeting: dict[str, Any], limit: float) -> Meeting:
    """Any other process: go to process 0."""
    process, began = greeting["process"], time.monotonic()
    where = f"process {process} of {greeting['processes']}"
    while True:
        left = limit - (time.monotonic() - began)
        try:
            connection = socket.create_connection((host, port), timeout=max(0.1, min(left, 10.0)))
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            break
        except OSError as error:
            if left <= 0:
                raise ConnectionError(
                    f"{where} cannot reach the coordinator at {host}:{port} within {limit:.0f} s "
                    f"({error.strerror or error}): is process 0 running there, and is the port open between the machines?"
                ) from error
            time.sleep(0.2)
    connection.settimeout(max(1.0, left) + 5.0)  # process 0 gives up first and says who is missing
    answer, rest = _first_line(connection)
    if "facts" not in answer:
        raise ConnectionError(
            answer.get("problem") or f"{where} reached {host}:{port}, which let it go: process 0 has ended, see its output"
        )
    return Meeting(process, {0: connection}, answer, rest)


def _first_line(connection: socket.socket, longest: float = math.inf) -> tuple[dict[str, Any], bytes]:
    """The JSON object that the other side says first ({} when it says none) and what came after it."""
    data = b""
    try:
        while b"\n" not in data and len(data) < longest:
            part = connection.recv(1 << 16)
            if not part:
                break
            data += part
        line, _, rest = data.partition(b"\n")
        said = json.loads(line)
    except (OSError, ValueError):
        return {}, b""
    return (said, rest) if isinstance(said, dict) else ({}, b"")


def _problem(guest: dict[str, Any], processes: int, arrived: dict[int, Any]) -> str | None:
    who = f"a process on {guest['host']}"
    if guest["processes"] != processes:
        return f"{who} was started as one of {guest['processes']} processes, process 0 as one of {processes}: start all alike"
    if guest["process"] in arrived or not 0 < guest["process"] < processes:
        return f"{who} says that it is process {guest['process']}, as another one does: give each its own number"
    return None


def _server(host: str, port: int, backlog: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server((host, port), backlog=backlog)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
