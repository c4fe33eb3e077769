"""Packing into ticks: dependencies, costs known from the cost model, phases, lifetimes and peaks."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.errors import UserError
from parallel.schedule import SCHEDULES, Table, make, make_forward, pack
from parallel.schedule.ticks import TickTable

SMALL = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = [name for name, spec in SCHEDULES.items() if spec.executable and name not in ("auto", "adaptive-v")]


def build(name, p, m, v, extra, backward):
    spec = SCHEDULES[name]
    group = p + extra if name in ("interleaved", "gis") else 0
    return make(name, p, m, v if spec.free_chunks else 0, group, backward)


TABLES = st.builds(
    build,
    st.sampled_from(NAMES),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["", "whole", "split"]),
)


@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaved_with_w_deferred_costs_the_bound_at_no_more_memory(v):
    """3m + 2(p-1)/v for any m >= p, and peaks that do not grow with m."""
    p = 4
    for m in (4, 5, 7, 8, 9, 11, 16, 33):
        split, whole = (pack(make("interleaved", p, m, v, backward=b)) for b in ("split", "whole"))
        assert split.cost() == pytest.approx(3 * m + 2 * (p - 1) / v)
        assert split.peaks()["a"] == split.peaks()["aw"] == whole.peaks()["a"]
    assert pack(make("interleaved", p, 400, v)).peaks() == pack(make("interleaved", p, 40, v)).peaks()


def test_peaks_of_1f1b_do_not_grow_with_m_and_those_of_gpipe_do():
    assert pack(make("1f1b", 4, 64)).peaks() == pack(make("1f1b", 4, 8)).peaks() == {"a": 4, "x": 1, "g": 1}
    assert pack(make("gpipe", 4, 64)).peaks()["a"] == 64


@SMALL
@given(table=TABLES, shape=st.sampled_from(["pairs", "single"]))
def test_packing_keeps_every_need_and_every_order(table, shape):
    ticks = pack(table, shape).validate()
    for row, back in zip(table.ranks, ticks.unpack()):
        assert list(row) == back
    assert len(ticks.at) == 3 * table.microbatches * table.stages * table.chunks
    assert ticks.busy.sum() == len(ticks.at)
    assert max(ticks.at.values()) == ticks.length - 1


def peak_by_counting(ticks: TickTable, name: str) -> int:
    lives = ticks.lifetimes()[name]
    return max(sum(a <= t <= b for a, b in rank.values()) for rank in lives for t in range(6 * ticks.length + 6))


@SMALL
@given(table=TABLES, shape=st.sampled_from(["pairs", "single"]))
def test_retiming_keeps_the_orders_of_each_kind(table, shape):
    ticks = pack(table, shape, "retime").validate()
    for row, back in zip(table.ranks, ticks.unpack()):
        for kind in ("F", "B", "W", "BW"):
            assert [a for a in row if a.kind == kind] == [a for a in back if a.kind == kind]
    again = dataclasses.replace(table, ranks=tuple(map(tuple, ticks.unpack())), pairs=()).validate()
    assert pack(again, shape).length <= ticks.length


def test_retiming_is_faster_and_holds_more():
    kept, retimed = (pack(make("1f1b", 8, 24), order=order) for order in ("keep", "retime"))
    assert (kept.cost(), max(kept.peak_activations)) == (153, 8)
    assert (retimed.cost(), max(retimed.peak_activations)) == (93, 15)
    assert pack(make("zb-h1", 8, 24), order="retime").cost() == 86


@settings(max_examples=20, deadline=None, derandomize=True)
@given(table=TABLES)
def test_peaks_are_the_most_lives_at_once(table):
    ticks = pack(table)
    assert set(ticks.peaks()) == ({"a", "x", "g"} if ticks.fused else {"a", "aw", "cut", "x", "g"})
    for name, peak in ticks.peaks().items():
        assert peak == peak_by_counting(ticks, name)
    for ranks in ticks.lifetimes().values():
        assert all(first <= last for rank in ranks for first, last in rank.values())


@SMALL
@given(table=TABLES, most=st.integers(1, 8))
def test_phases_cover_what_is_held(table, most):
    ticks = pack(table)
    phases, held = ticks.phases(most), ticks.held()
    assert 1 <= len(phases) <= most
    assert [a for a, *_ in phases[1:]] == [b for _, b, _ in phases[:-1]]
    assert phases[0][0] == 0
    assert phases[-1][1] == ticks.length
    for start, stop, slots in phases:
        assert (held[start:stop] <= np.array(slots)).all()
    assert ticks.cost(idle="compute") >= ticks.cost(idle="skip") - 1e-9


def test_phases_merge_at_the_least_cost():
    ticks = pack(make("interleaved", 3, 5, 2, backward="split"))
    held = ticks.held()
    for most in (1, 2, 3):
        cuts = itertools.combinations(range(1, ticks.length), most - 1)
        best = min(
            sum((b - a) * held[a:b].any(0).sum() for a, b in itertools.pairwise((0, *cut, ticks.length))) for cut in cuts
        )
        assert sum((b - a) * sum(slots) for a, b, slots in ticks.phases(most)) == best


def test_a_whole_backward_is_fused_and_a_deferred_one_is_not():
    assert pack(make("interleaved", 4, 8)).fused
    assert not pack(make("interleaved", 4, 8, backward="split")).fused
    assert pack(make("interleaved", 1, 8, backward="split")).fused  # one rank has nothing to wait for


@pytest.mark.parametrize(("placement", "v"), [("linear", 1), ("loop", 3), ("v", 2)])
def test_forward_only(placement, v):
    ticks = pack(make_forward(placement, 4, 8, v)).validate()
    assert ticks.forward_only
    assert set(ticks.peaks()) == {"x"}
    assert not ticks.held()[:, 1:].any()
    assert len(ticks.phases()) == 1


def test_what_cannot_be_packed_is_said():
    table = make("1f1b", 2, 2)
    with pytest.raises(UserError, match="linear, loop or v"):
        pack(Table("mine", 2, 4, 2, "wave", table.ranks))
    with pytest.raises(UserError, match="single"):
        pack(table, "triple")
    with pytest.raises(UserError, match="keep"):
        pack(table, order="sorted")
    with pytest.raises(UserError, match="skip"):
        pack(table).cost(idle="sleep")
