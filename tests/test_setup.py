"""The Makefile: which environment, which Python, and when it installs; with an interpreter that only pretends."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.smoke, pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")]

# Says its version, makes an "environment" that holds a copy of itself, and writes down what it is asked to install.
PRETENDER = """#!/bin/sh
case "$*" in
  *version_info*) echo {version};;
  *"import ensurepip"*) exit {ensurepip};;
  *"-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python";;
  *"pip install"*) echo "$*" >> {log};;
esac
"""


def pretender(folder: Path, version: str = "3.12", ensurepip: int = 0) -> Path:
    path = folder / "python"
    path.write_text(PRETENDER.format(version=version, ensurepip=ensurepip, log=folder / "log"))
    path.chmod(0o755)
    return path


def make(*arguments: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.10"])
def test_an_older_python_is_refused_with_one_sentence(tmp_path, version):
    result = make("demo", f"PYTHON={pretender(tmp_path, version)}", f"VENV={tmp_path}/env")
    assert result.returncode == 2 and not (tmp_path / "env").exists()
    first = result.stderr.splitlines()[0]
    assert "needs Python 3.11 or newer" in first and f"is {version}" in first


def test_no_interpreter_and_no_ensurepip_are_named(tmp_path):
    assert "cannot be run" in make("setup", f"PYTHON={tmp_path}/none", f"VENV={tmp_path}/env").stderr
    result = make("setup", f"PYTHON={pretender(tmp_path, ensurepip=1)}", f"VENV={tmp_path}/env")
    assert result.returncode == 2 and "python3-venv" in result.stderr


def test_an_environment_for_each_interpreter():
    assert ".venv is ready" in make("-n", "setup", "PYTHON=python3").stdout
    assert ".venv-python3.99 is ready" in make("-n", "setup", "PYTHON=python3.99").stdout
    assert ".venv-opt-x-bin-python is ready" in make("-n", "setup", "PYTHON=/opt/x/bin/python").stdout


def test_installs_once_and_again_when_the_requirements_change(tmp_path):
    arguments = [f"PYTHON={pretender(tmp_path)}", f"VENV={tmp_path}/env"]
    log = tmp_path / "log"
    for expected in (1, 1):
        assert make("setup", *arguments).returncode == 0
        assert log.read_text().count("requirements.txt") == expected
    assert make("lint", *arguments).returncode == 0
    assert log.read_text().count("requirements-dev.txt") == 1
    stamp = tmp_path / "env" / ".installed-3.12"
    os.utime(stamp, (1, 1))  # older than the requirements
    assert make("setup", *arguments).returncode == 0
    assert log.read_text().count("requirements.txt") == 2
    pretender(tmp_path, "3.13")  # another version behind the same name
    assert make("setup", *arguments).returncode == 0
    assert log.read_text().count("requirements.txt") == 3
