"""Notebooks from Python files whose cells begin with `# %%` (`# %% [markdown]`: text, each line after `# `).

    python experiments/notebooks/convert.py        # writes NAME.ipynb beside each NAME.py, without outputs

Edit the Python files: they are what a reader compares. jupytext opens them as notebooks too.
"""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NAMES = ("inspect_checkpoint", "compare_steps")


def cells(text: str) -> list[tuple[str, str]]:
    """(kind, source) of the cells of a percent file; kind is code or markdown."""
    found = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        title, _, source = part.partition("\n")
        markdown = title.strip() == "[markdown]"
        if markdown:
            source = "\n".join(line.removeprefix("#").removeprefix(" ") for line in source.splitlines())
        found.append(("markdown" if markdown else "code", source.strip("\n")))
    return found


def notebook(text: str) -> dict[str, Any]:
    """The notebook of a percent file, as JSON in the format 4.5, without outputs."""
    kernel = dict(display_name="Python 3", language="python", name="python3")
    parts = []
    for number, (kind, source) in enumerate(cells(text)):
        part = dict(cell_type=kind, id=f"cell-{number}", metadata={}, source=source.splitlines(keepends=True))
        parts.append(part | (dict(execution_count=None, outputs=[]) if kind == "code" else {}))
    return dict(cells=parts, metadata=dict(kernelspec=kernel, language_info=dict(name="python")), nbformat=4, nbformat_minor=5)


def main() -> None:
    """Write the notebooks."""
    for name in NAMES:
        text = json.dumps(notebook((FOLDER / f"{name}.py").read_text()), indent=1, ensure_ascii=False)
        (FOLDER / f"{name}.ipynb").write_text(text + "\n")


if __name__ == "__main__":
    main()
