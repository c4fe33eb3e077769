"""What several files of tests share, and only those that ask for it."""

import dataclasses
import functools

import pytest


@pytest.fixture(scope="session")
def setups():
    """{name: Setup} of every layout in which tests save and restore a state."""
    from tests.llm.states import LAYOUTS, Setup

    return {name: Setup(**layout) for name, layout in LAYOUTS.items()}


@functools.cache
def program_of(config, devices):
    from llm.step import build

    return build(config, list(devices))


@pytest.fixture
def one_program(monkeypatch):
    """Runs that differ in nothing that is compiled share a program."""
    import llm.train
    from llm.config import CheckpointConfig, EvaluateConfig, TrainConfig
    from tests.llm.faults import tiny

    def shared(config, devices):
        train = dataclasses.replace(TrainConfig(), steps=config.train.steps)
        same = dict(train=train, checkpoint=CheckpointConfig(), evaluate=EvaluateConfig(), init_from="", data=tiny().data)
        return program_of(dataclasses.replace(config, **same), tuple(devices))

    monkeypatch.setattr(llm.train, "build", shared)
