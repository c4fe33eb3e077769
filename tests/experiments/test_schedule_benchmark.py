"""The machine model of the schedule benchmark, and what it calls a wrong order. Nothing is compiled."""

from types import SimpleNamespace

import pytest

from experiments.benchmarks import execution
from parallel.schedule import make, pack


@pytest.mark.parametrize(
    ("idle", "cores", "ticks"), [("skip", 4, 84), ("skip", 2, 16 + 6 + 32), ("compute", 4, 84), ("compute", 2, 84)]
)
def test_a_tick_costs_its_slowest_rank_or_its_work_over_the_cores(idle, cores, ticks):
    """GPipe, 4 stages and 4 microbatches: 6 ticks with F, one with all slots, 6 with B and W. An action of all ranks at once
    takes 4; skipped on two cores, the ticks take 2 2 3 4 3 2, 6, and 4 6 8 6 4 4."""
    program = SimpleNamespace(tick_table=pack(make("gpipe", 4, 4)), idle=idle)
    costs = dict(F=4.0, B=4.0, W=4.0)
    seconds = execution.predict(program, costs, vocabulary=0.5, one_tick=13.0, cores=cores)
    assert seconds == pytest.approx(ticks + 4 * 0.5 + 1)


def row(name: str, predicted: float, measured: float) -> dict:
    facts = dict(ticks=1, predicted_s=predicted, measured_s=measured, error_pct=100 * (predicted / measured - 1))
    both = {f"{idle}_{key}": value for idle in execution.IDLE for key, value in facts.items()}
    return dict(name=name, chunks=1, backward="whole", **both)


def test_pairs_in_the_wrong_order():
    rows = [row("a", 1.0, 1.0), row("b", 1.05, 0.9), row("c", 1.2, 0.95)]
    found = execution.summary(rows, "wall")
    assert found["pairs_more_than_10_pct_apart"] == 2
    assert found["pairs_in_wrong_order"] == [["a/1/whole", "c/1/whole"]]
    assert "1 of them in the wrong order" in execution.table(found)
