"""Ends a process that hangs: dumps the stack of every thread and exits with 70, so that a launcher can start it again."""

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from parallel.errors import HUNG

FACTOR = 20.0  # work that takes this many times its usual time hangs ...
LEAST = 300.0  # ... but not before so many seconds
HISTORY = 50  # durations of a kind of work that make its usual time


class Watchdog:
    """Watches pieces of work of several kinds ("step", "evaluation"); `with watchdog.watch(kind):` around each.

    seconds: how long one may take; -1: FACTOR times the median of its kind, at least LEAST; 0: for ever. The first of a
    kind compiles and is never watched; a kind that usually takes longer than `seconds` is given FACTOR times its median,
    and with -1 the second one, of which nothing is known either, is not watched."""

    def __init__(self, seconds: float, report: Callable[[str], None] = lambda text: None):
        self.seconds, self.report = seconds, report
        self._history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._begun: set[str] = set()
        self._deadline, self._kind = None, ""
        self._changed = threading.Condition()
        if seconds:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def limit(self, kind: str) -> float | None:
        """Seconds that the next work of this kind may take, or None."""
        if not self.seconds or kind not in self._begun:
            return None
        usual = FACTOR * statistics.median(self._history[kind]) if self._history[kind] else None
        if self.seconds > 0:
            return self.seconds if kind == "step" else max(self.seconds, usual or 0.0)
        return max(LEAST, usual) if usual is not None else None

    @contextlib.contextmanager
    def watch(self, kind: str) -> Iterator[None]:
        """Watch the work of the block."""
        limit, began = self.limit(kind), time.monotonic()
        self._set(None if limit is None else began + limit, kind)
        try:
            yield
        finally:
            self._set(None, "")
        if kind in self._begun:
            self._history[kind].append(time.monotonic() - began)
        self._begun.add(kind)

    def _set(self, deadline: float | None, kind: str) -> None:
        with self._changed:
            self._deadline, self._kind = deadline, kind
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._deadline is None or time.monotonic() < self._deadline:
                self._changed.wait(None if self._deadline is None else self._deadline - time.monotonic())
            text = f"watchdog: no end of the {self._kind} after its time limit (train.watchdog={self.seconds:g})"
            print(f"\n{text}; every thread's stack:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            with contextlib.suppress(Exception):
                self.report(text)
            os._exit(HUNG)
