"""The house: which part imports which, what a wrong flag may cost, and how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "parallel": {"llm", "experiments", "main", "tests"},
    "llm": {"experiments", "main", "tests"},
    "experiments": {"main", "tests"},
}


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_floor_imports_only_what_is_below(folder):
    wrong = {str(path): imported(path) & FORBIDDEN[folder] for path in python_files(folder)}
    assert not {path: names for path, names in wrong.items() if names}


def test_heavy_packages_are_imported_only_where_needed():
    heavy = ("jax", "flax", "orbax", "tensorstore", "matplotlib", "tokenizers", "rich")
    code = f"import sys, main; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_files_hold_one_idea():
    files = [path for folder in ("llm", "parallel", "experiments") for path in python_files(folder)]
    long = {str(path): lines for path in files if (lines := len(path.read_text().splitlines())) > 400}
    assert not long
