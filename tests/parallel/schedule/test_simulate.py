"""The asynchronous machine: known makespans, peaks, messages, unequal costs."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.errors import UserError
from parallel.schedule import make, pack
from parallel.schedule.simulate import memory_peaks, simulate, stage_costs, tick_durations

SMALL = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("p", "m", "name", "v", "backward", "makespan", "bubble", "peaks"),
    [
        (4, 8, "gpipe", 1, "whole", 33, 0.2727, [8, 8, 8, 8]),
        (4, 8, "1f1b", 1, "whole", 33, 0.2727, [4, 3, 2, 1]),
        (4, 8, "eager-1f1b", 1, "whole", 33, 0.2727, [7, 5, 3, 1]),
        (4, 8, "interleaved", 2, "whole", 28.5, 0.1579, [5.5, 4.5, 3.5, 2.5]),
        (4, 8, "interleaved", 4, "whole", 26.25, 0.0857, [4.75, 4.25, 3.75, 3.25]),
        (4, 8, "1f1b", 1, "split", 27, 0.1111, [4, 4, 4, 4]),
        (8, 24, "1f1b", 1, "whole", 93, 0.2258, [8, 7, 6, 5, 4, 3, 2, 1]),
        (8, 24, "1f1b", 1, "split", 79, 0.0886, [8] * 8),
    ],
)
def test_known_values_at_unit_cost(p, m, name, v, backward, makespan, bubble, peaks):
    run = simulate(make(name, p, m, v, backward=backward))
    assert run.makespan == run.rank_span == pytest.approx(makespan)
    assert run.bubble_rank_span == pytest.approx(bubble, abs=5e-5)
    assert run.peak_activations == peaks


def test_a_larger_group_hides_the_hop():
    small, large = (simulate(make("interleaved", 4, 12, 2, g), comm=0.25) for g in (4, 6))
    assert (small.makespan, large.makespan) == (44.0, 42.0)
    assert (small.peak_activations[0], large.peak_activations[0]) == (5.5, 6.5)


def test_messages():
    assert simulate(make("1f1b", 4, 8)).messages_per_rank == [8, 16, 16, 8]
    assert simulate(make("interleaved", 4, 8, 2)).messages_per_rank == [24, 32, 32, 24]
    assert simulate(make("interleaved", 1, 8, 2)).messages_per_rank == [0]


def test_residuals_between_b_and_w():
    assert simulate(make("1f1b", 4, 8)).residual_peak == [0, 0, 0, 0]
    assert simulate(make("1f1b", 4, 8, backward="split")).residual_peak == [1, 2, 3, 4]
    # Zero Bubble's limits: F adds 2, B frees 1, W frees 1
    assert memory_peaks(make("1f1b", 4, 8, backward="split"), 2, -1, 1)[0] == 8


def test_costs_of_stages_and_of_the_vocabulary():
    table = make("1f1b", 4, 8)
    even = stage_costs(table, (2, 3, 1))
    assert np.allclose(even, [[2, 3, 1]] * 4)
    assert np.allclose(stage_costs(table, (1, 1, 1), layers=[3, 4, 4, 5])[:, 0], [0.75, 1, 1, 1.25])
    assert np.allclose(stage_costs(table, (1, 1, 1), vocabulary=(4, 4, 4))[:, 0], 2)
    assert np.allclose(stage_costs(table, (1, 1, 1), vocabulary=(4, 4, 4), spread=False)[:, 0], [1, 1, 1, 5])
    heavy = simulate(table, stage_costs(table, vocabulary=(1, 1, 1), spread=False))
    assert simulate(table, stage_costs(table, vocabulary=(1, 1, 1))).makespan < heavy.makespan
    assert heavy.ideal == pytest.approx(30)
    with pytest.raises(UserError, match="4 sizes"):
        stage_costs(table, layers=[1, 2])
    with pytest.raises(UserError, match="at least 0"):
        simulate(table, (1, -1, 1))


@SMALL
@given(
    name=st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "interleaved"]),
    p=st.integers(1, 6),
    m=st.integers(1, 20),
    split=st.booleans(),
    costs=st.tuples(*[st.floats(0.1, 3)] * 3),
    comm=st.floats(0, 1),
)
def test_every_need_holds_in_time(name, p, m, split, costs, comm):
    table = make(name, p, m, backward="split" if split else "whole")
    run = simulate(table, costs, comm)
    ends = {}
    for r, (rank, times) in enumerate(zip(table.ranks, run.times)):
        assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(times))
        for (kind, c, i), (_, end) in zip(rank, times):
            ends["B" if kind == "BW" else kind, table.stage_of(r, c), i] = end
    for r, (rank, times) in enumerate(zip(table.ranks, run.times)):
        for action, (start, _) in zip(rank, times):
            need = table.waits_for(r, action)
            if need is not None:
                assert start >= ends[need] + comm * (table.places[need[1]][0] != r) - 1e-9
    assert run.makespan >= run.rank_span >= run.ideal - 1e-9
    assert max(run.peak_activations) <= m


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("eager-1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_peaks_do_not_grow_with_m(name, v):
    few, many = (simulate(make(name, 4, m, v)) for m in (16, 160))
    assert few.peak_activations == many.peak_activations


def test_large_tables_are_quick():
    run = simulate(make("interleaved", 32, 256, 4, backward="split"))
    assert run.makespan == pytest.approx(256 * 3 + 31 * 2 / 4, rel=0.01)


@pytest.mark.parametrize("idle", ["skip", "compute"])
@pytest.mark.parametrize(("name", "v"), [("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_ticks_take_their_costs(name, v, idle):
    ticks = pack(make(name, 4, 6, v, backward="split"))
    costs = (1.0, 1.5, 0.5)
    durations = tick_durations(ticks, costs, idle)
    assert durations.sum() == pytest.approx(ticks.cost(*costs, idle=idle))
    assert tick_durations(ticks, costs, idle, vocabulary=0.25).sum() == pytest.approx(durations.sum() + 6 * 0.25)
    uneven = stage_costs(ticks.table, costs, layers=[2] + [1] * (4 * v - 1))
    assert tick_durations(ticks, uneven, idle).sum() > durations.sum()
    with pytest.raises(UserError, match="skip"):
        tick_durations(ticks, costs, "wait")
