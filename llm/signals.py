"""A polite stop: the first SIGINT, SIGTERM or SIGUSR1 is noted for the loop, a second one ends the process at once."""

import os
import signal
import sys
import threading
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME = 0.3  # seconds in which signals are the same request: a terminal and a launcher may both hand one on


class StopRequest:
    """Context in which `requested` becomes the name of the first signal that arrives.

    Python runs signal handlers only between bytecodes, which a thread that waits for a device does not reach; so the
    interpreter's wake-up file hands the signal to a watching thread, which also hears a second one. Outside the main
    thread (and so in some notebooks) signals are left alone.
    """

    def __init__(self):
        self.requested: str | None = None

    def __enter__(self) -> "StopRequest":
        self._active = threading.current_thread() is threading.main_thread()
        if not self._active:
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(self._read,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if not self._active:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._write)  # ends the watching thread, which closes the other end

    def _watch(self, read: int) -> None:
        noted = 0.0
        while data := os.read(read, 1):
            if data[0] not in SIGNALS:
                continue
            if self.requested and time.monotonic() - noted > SAME:
                os._exit(128 + data[0])
            if self.requested:
                continue
            noted = time.monotonic()
            self.requested = signal.Signals(data[0]).name
            print(f"\n{self.requested}: finishing this step and saving; once more to stop at once", file=sys.stderr)
        os.close(read)
