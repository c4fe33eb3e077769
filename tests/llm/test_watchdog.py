"""The watchdog: what a step that hangs leaves behind, and how long work may take."""

import subprocess
import sys
from pathlib import Path

import pytest

from llm.watchdog import FACTOR, HUNG, LEAST, Watchdog

ROOT = Path(__file__).resolve().parents[2]

HANGS = """
import threading, time
from llm.watchdog import Watchdog
def stuck_here():
    time.sleep(60)
watchdog = Watchdog(0.5)
with watchdog.watch("step"):
    time.sleep(1)  # it compiles
with watchdog.watch("step"):
    pass
threading.Thread(target=stuck_here, daemon=True).start()
with watchdog.watch("step"):
    stuck_here()
"""


@pytest.mark.smoke
def test_the_watchdog_shows_every_stack_and_exits_70():
    result = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.returncode == HUNG == 70
    assert "watchdog: no end of the step" in result.stderr and result.stderr.count("stuck_here") == 2


@pytest.mark.smoke
def test_how_long_work_may_take():
    def limits(seconds, kind="step", durations=()):
        watchdog = Watchdog(0)
        watchdog.seconds = seconds
        watchdog._history[kind].extend(durations)
        watchdog._begun |= {kind} if durations else set()
        return watchdog.limit(kind)

    assert limits(5.0) is None  # the first compiles
    assert limits(5.0, durations=[1.0]) == 5.0 and limits(5.0, "evaluation", [1.0]) == FACTOR
    assert limits(5.0, "evaluation", [0.1]) == 5.0 and limits(0, durations=[1.0]) is None
    assert limits(-1, durations=[1.0]) == LEAST and limits(-1, durations=[100.0, 100.0, 1.0]) == 100 * FACTOR
    assert limits(-1) is None
