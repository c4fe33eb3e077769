"""Eight virtual CPU devices and a compiler in a hurry for every test, set before anything imports jax."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()
# Compile time is most of the tests' time: leave out LLVM's expensive passes (XLA's own passes on the HLO stay on).
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("convoy", derandomize=True, deadline=None)
settings.load_profile("convoy")

import jax  # noqa: E402

jax.devices()  # now: a command that a test runs would ask for the number of devices that it needs alone


@pytest.fixture(autouse=True)
def same_flags(monkeypatch):
    """A command in this process writes XLA_FLAGS; neither it nor a child process of a later test may feel that."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
