"""The demo from end to end, with a smaller run."""

import json

import pytest

from experiments import demo
from tests.llm.runs import small


@pytest.mark.smoke
def test_the_demo_trains_evaluates_writes_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setattr(demo, "WORKDIR", tmp_path)
    monkeypatch.setattr(demo, "get_config", lambda: small(mesh__pipe=4, mesh__data=2, train__steps=3, evaluate__every=0))
    assert demo.main() == 0
    out = capsys.readouterr().out
    assert "summary" in out and "perplexity" in out and "finished: step 3" in out
    assert (tmp_path / "ticks.png").stat().st_size > 10_000
    assert (tmp_path / "sample.txt").read_text().startswith(demo.PROMPTS[0])
    assert json.loads((tmp_path / "evaluation.json").read_text())["step"] == 3
    assert demo.main() == 0 and "is finished" in capsys.readouterr().out
