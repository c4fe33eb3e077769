"""Ticks measured by time stamps of the compiled step, drawn under the predicted ones."""

import numpy as np
import pytest

from llm.timeline import table, timeline
from llm.train import train
from tests.llm.runs import small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    train(small(mesh__pipe=2, train__steps=1, evaluate__every=0), workdir)
    return workdir


def test_every_tick_is_measured_and_drawn(run):
    result = timeline(run)
    assert len(result["predicted_s"]) == len(result["measured_s"]) == result["ticks"]
    assert min(result["measured_s"]) >= 0 and np.count_nonzero(result["measured_s"]) > result["ticks"] // 2
    assert np.isclose(sum(result["predicted_s"]), sum(result["measured_s"]), rtol=1e-3)
    assert (run / "timeline.png").stat().st_size > 10_000
    assert f"{result['error_pct']} %" in table(result)
