"""Compiling for GPUs that are not there: the environment, the child process, the targets."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel import deviceless
from parallel.errors import UserError

compiles = pytest.mark.gpu_compile


@compiles
@pytest.mark.parametrize("target", [pytest.param("h100", marks=pytest.mark.smoke), "a100-40g", "a100-80g", "h200", "b200"])
def test_every_target_compiles(target):
    found = deviceless.call(target, "gpu.programs:matmul", dict(gpus=16))
    assert found["kind"] == deviceless.TARGETS[target].device
    assert (found["gpus"], found["hosts"]) == (16, 2)
    assert "is_scheduled=true" in found["text"]


@compiles
@pytest.mark.smoke
def test_what_the_child_says_comes_back():
    with pytest.raises(UserError, match=r"^this cannot be$"):
        deviceless.call("h100", "gpu.programs:wrong", "this")
    with pytest.raises(deviceless.CompilerError, match="ZeroDivisionError: of all things"):
        deviceless.call("h100", "gpu.programs:broken", {})
    with pytest.raises(deviceless.CompilerError, match=r"(?s)ended by signal 6.*the compiler gives up"):
        deviceless.call("h100", "gpu.programs:aborted", {})
    with pytest.raises(UserError, match="12 GPUs do not fill hosts of 8"):
        deviceless.call("h100", "gpu.programs:matmul", dict(gpus=12))


@compiles
@pytest.mark.smoke
def test_the_child_ends_with_its_parent(tmp_path):
    """Also when the parent is killed and can do nothing about it."""
    file = tmp_path / "child"
    code = f"from parallel import deviceless; deviceless.call('h100', 'gpu.programs:sleeping', {str(file)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=deviceless.ROOT)
    try:
        wait_until(lambda: file.exists() and file.read_text())
    finally:
        parent.kill()
        parent.wait()
    child, folder = file.read_text().split()
    assert Path(folder).is_dir() or not Path(f"/proc/{child}").exists()
    wait_until(lambda: not Path(f"/proc/{child}").exists() and not Path(folder).exists())


def wait_until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_missing_or_other_environment_is_refused_with_what_makes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(deviceless, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", "/somewhere/.venv-python3.12")
    with pytest.raises(UserError, match=r"compile-python3\.12: make setup-gpu-compile PYTHON=python3\.12"):
        deviceless.environment()
    monkeypatch.setattr(sys, "prefix", "/somewhere/.venv")
    with pytest.raises(UserError, match=r"environment \.venv-gpu-compile: make setup-gpu-compile makes it"):
        deviceless.environment()
    python = tmp_path / ".venv-gpu-compile" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(UserError, match="has no jax-cuda13-plugin and jax here is"):
        deviceless.environment()
    info = deviceless._site(python.parents[1]) / "jax_cuda13_plugin-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: jax-cuda13-plugin\nVersion: 0.1.0\n")
    with pytest.raises(UserError, match=r"has jax-cuda13-plugin 0\.1\.0 and jax here is .* make setup-gpu-compile brings"):
        deviceless.environment()


def test_targets_are_refused_by_name():
    with pytest.raises(UserError, match="h1000 is not a GPU to compile for: there are a100-40g, a100-80g, h100"):
        deviceless.call("h1000", "gpu.programs:matmul", {})
