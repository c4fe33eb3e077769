"""Tests that compile for GPUs, in the environment `.venv-gpu-compile`; without it they are skipped, and say so.

`-m gpu_compile` (make test-gpu-compile) runs them all, any other choice only those marked smoke: one or two minutes."""

import os
from pathlib import Path

import pytest

from parallel import deviceless
from parallel.errors import UserError


def pytest_collection_modifyitems(config, items):
    mine = [item for item in items if item.get_closest_marker("gpu_compile")]
    if not mine:
        return
    everything = "gpu_compile" in config.getoption("-m")
    try:
        deviceless.environment()
        reason = ""
    except UserError as error:
        reason = str(error)
    for item in mine:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif not everything and not item.get_closest_marker("smoke"):
            item.add_marker(pytest.mark.skip(reason="long: make test-gpu-compile runs it"))


@pytest.fixture(autouse=True, scope="session")
def programs_are_found():
    """The compile environment imports what the tests compile from the tests' folder."""
    tests = str(Path(__file__).parents[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield
