"""The log of what a run is doing, over all its restarts: one JSON line whenever something else begins.

A line has `time` (s since 1970), `run_s` (s since this start, by a clock that never goes backwards; 0 in its first line),
`kind` (what begins now), `step` (updates that the state holds now), `data_s` and facts of its kind. So the time between two
lines belongs to the kind of the first. While `steps` goes on there is a line every now and then, rarer in long runs; the
`data_s` of a line are the seconds since the line before in which the devices waited for their next batch. During everything
else a thread repeats the line, so that the log of a killed run ends when the run did.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm.metrics import read_jsonl
from parallel.errors import UserError

EVENTS = "events.jsonl"
KINDS = ("start", "restore", "compile", "data", "steps", "evaluation", "sample", "save", "rollback", "stop")
BEAT = 15.0  # seconds after which a line is repeated
RARELY = 30.0  # seconds between two lines of `steps` at most


class EventLog:
    """Context that appends to the log of the run in `folder`; None: writes nothing. A start that is refused leaves no line.

    began: when the clock of this start began to run, by time.monotonic (default: now). step: updates that the state holds;
    data_s: seconds that the devices waited for a batch since the last line; why: the reason to stop, unless an error says
    another.
    """

    def __init__(self, folder: Path | None, began: float | None = None, beat: float = BEAT):
        self.folder, self.beat = folder, beat
        self.last = time.monotonic()
        self.began = self.last if began is None else began
        self.kind, self.step, self.data_s, self.why = "", 0, 0.0, "finished"
        self._file, self._size, self._noted = None, 0, False
        self._changed = threading.Condition(threading.RLock())

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        refused = isinstance(error, UserError) and self.kind in ("start", "restore")
        self.close(f"{kind.__name__}: {error}" if kind else self.why)
        if refused and self.folder:
            with contextlib.suppress(OSError):
                os.truncate(self.folder / EVENTS, self._size)

    def write(self, kind: str, **facts: Any) -> None:
        """What begins now. The first line, `start`, counts from `began`. A log that cannot be written gets a note."""
        with self._changed:
            if self.kind == "stop":
                return
            first, self.kind = not self.kind, kind
            if self.folder is None:
                return
            run_s = 0.0 if first else time.monotonic() - self.began
            line = {"time": time.time() - (time.monotonic() - self.began) + run_s, "run_s": run_s, "kind": kind}
            line |= {"step": self.step, "data_s": self.data_s} | facts
            self.last, self.data_s = time.monotonic(), 0.0
            try:
                if first:
                    self._open()
                if self._file:
                    self._file.write(json.dumps(line) + "\n")
                    self._file.flush()  # what a full disk does not take is tried again with the next line
            except OSError as error:
                if not self._noted:
                    print(f"note: {EVENTS} cannot be written: {error}", file=sys.stderr)
                self._noted = True

    @contextlib.contextmanager
    def phase(self, kind: str, **facts: Any) -> Iterator[None]:
        """Something that interrupts what was going on, which goes on afterwards unless it fails."""
        before = self.kind
        self.write(kind, **facts)
        yield
        self.write(before)

    def progress(self, step: int) -> None:
        """A step is completed: a line of `steps` when the last one is long enough ago."""
        self.step, now = step, time.monotonic()
        if self.kind == "steps" and now - self.last >= min(RARELY, max(1.0, (now - self.began) / 60)):
            self.write("steps")

    def close(self, why: str) -> None:
        """The run stops."""
        with self._changed:
            if self.kind:
                self.write("stop", why=why)
            file, self._file = self._file, None
            self._changed.notify()
            if file:
                with contextlib.suppress(OSError):
                    file.close()

    def close_soon(self, why: str) -> None:
        """`close` for a process that is about to end because something hangs, maybe this log: waits no longer than 5 s."""
        closing = threading.Thread(target=self.close, args=(why,), daemon=True)
        closing.start()
        closing.join(5)

    def _open(self) -> None:
        path = self.folder / EVENTS
        self._file = open(path, "a")  # noqa: SIM115
        self._size = path.stat().st_size
        if self._size:
            with open(path, "rb") as file:
                file.seek(self._size - 1)
                if file.read() != b"\n":  # torn by a kill: our first line must not become its rest
                    self._file.write("\n")
        threading.Thread(target=self._repeat, name="events", daemon=True).start()

    def _repeat(self) -> None:
        """Say that the run is alive; not during `steps`, where only progress does."""
        with self._changed:
            while self._file:
                self._changed.wait(self.beat)
                if self._file and self.kind not in ("steps", "stop") and time.monotonic() - self.last >= self.beat:
                    self.write(self.kind, alive=True)


def read(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a log, without those that are torn or not ours."""
    number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    names = ("time", "run_s", "step", "data_s")
    lines = read_jsonl(Path(folder) / EVENTS)
    return [line for line in lines if line.get("kind") in KINDS and all(number(line.get(name)) for name in names)]
