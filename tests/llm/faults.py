"""A run of a second or two, and what disturbs it."""

import os
import signal
import time

from tests.llm.runs import small

TINY = dict(
    model__layers=1, model__width=16, model__vocab=280, pipeline__chunks=1,
    checkpoint__every=3, checkpoint__keep=9, evaluate__every=5, train__steps=12,
)  # fmt: skip


def tiny(**changes):
    return small(**TINY | changes)


def after(monkeypatch, place, name: str, act, times: int = 1):
    """Let `act` happen when a function has been called for the so-manieth time."""
    whole, calls = getattr(place, name), []

    def wrapped(*args, **options):
        result = whole(*args, **options)
        calls.append(0)
        if len(calls) == times:
            act()
        return result

    monkeypatch.setattr(place, name, wrapped)


def interrupt(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(0.2)
