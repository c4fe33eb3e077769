"""The notebooks: committed without outputs, the same as the Python files beside them, and every cell runs."""

import json
import sys

import matplotlib.pyplot as plt
import pytest

from experiments.notebooks.convert import FOLDER, NAMES, cells, notebook


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_python_file_without_outputs(name):
    committed = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert committed == notebook((FOLDER / f"{name}.py").read_text()), "run experiments/notebooks/convert.py"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in committed["cells"] if "outputs" in cell)


@pytest.mark.smoke
def test_cells():
    text = "# ignored\n# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\n\n# %%\ny = 2\n"
    assert cells(text) == [("markdown", "# Title\n\ntext"), ("code", "x = 1"), ("code", "y = 2")]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONVOY_RUNS", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.gcf()))
    variables = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), variables)
    plt.close("all")
    out = capsys.readouterr().out
    assert len(drawn) == 1
    if name == "inspect_checkpoint":
        assert len(variables["losses"]) == 6 and min(variables["losses"]) > variables["whole"] - 0.05
        assert "rank 1: chunk 0 has layers" in out
    else:
        assert max(variables["differences"].values()) < 1e-4 and (tmp_path / "notebook-steps" / "ticks.png").is_file()
