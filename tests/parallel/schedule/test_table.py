"""The schedule table: placements, validation that names the wrong action, and what the generators promise."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.errors import UserError
from parallel.schedule import SCHEDULES, Action, ScheduleError, Table, make, make_forward, place, stage_of

ONE_CHUNK = st.sampled_from(["gpipe", "1f1b", "eager-1f1b"])
SMALL = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize(("placement", "chunks"), [("linear", 1), ("loop", 3), ("v", 2), ("wave", 4), ("bidirectional", 2)])
def test_places_and_their_inverse(placement, chunks):
    stages = 4
    seen = set()
    for s in range(stages * chunks):
        rank, chunk = place(placement, stages, chunks, s)
        assert stage_of(placement, stages, rank, chunk) == s
        seen.add((rank, chunk))
    assert len(seen) == stages * chunks


def test_neighbours_of_a_v_share_a_rank_at_the_turn():
    assert [place("v", 4, 2, s) for s in (3, 4, 7)] == [(3, 0), (3, 1), (0, 1)]


def change(table: Table, rank: int, actions) -> Table:
    ranks = list(table.ranks)
    ranks[rank] = tuple(actions)
    return dataclasses.replace(table, ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda row: row[1:], r"rank 1: BW of chunk 0, microbatch 0: comes before its F"),
        (lambda row: row[:-1], r"rank 1: B of chunk 0, microbatch 4: is missing"),
        (lambda row: [*row, Action("F", 0, 2)], r"rank 1: F of chunk 0, microbatch 2: a second time"),
        (lambda row: [*row, Action("W", 0, 2)], r"W of chunk 0, microbatch 2: its weight gradient was already"),
        (lambda row: [*row, Action("B", 0, 2)], r"B of chunk 0, microbatch 2: its input gradient was already"),
        (lambda row: [*row, Action("F", 1, 0)], r"F of chunk 1, microbatch 0: there are 1 chunks and 5 micro"),
        (lambda row: [*row, Action("F", 0, -1)], r"microbatch -1: there are"),
        (lambda row: [*row, Action("X", 0, 0)], r"X of chunk 0, microbatch 0: the kind is one of"),
        (lambda row: row[::-1], r"comes before its F"),
    ],
)
def test_a_wrong_row_is_refused_by_name(edit, says):
    table = make("1f1b", 3, 5).validate()
    with pytest.raises(ScheduleError, match=says):
        change(table, 1, edit(list(table.ranks[1]))).validate()


def test_a_deadlock_names_who_waits_for_what():
    table = make("1f1b", 2, 2)
    row = [Action("F", 0, 0), Action("BW", 0, 0), Action("F", 0, 1), Action("BW", 0, 1)]
    other = [Action("F", 0, 1), Action("BW", 0, 1), Action("F", 0, 0), Action("BW", 0, 0)]
    says = r"deadlock: rank 0 waits at position 1 \(BW of chunk 0, microbatch 0\) for B"
    with pytest.raises(ScheduleError, match=says):
        dataclasses.replace(table, ranks=(tuple(row), tuple(other))).validate()


def test_pairs_join_an_f_and_a_b_of_different_units():
    table = make("1f1b", 2, 3)
    row = table.ranks[0]
    assert [a.kind for a in row[:3]] == ["F", "F", "BW"]
    dataclasses.replace(table, pairs=(frozenset({1}), frozenset())).validate()
    for bad in (0, len(row) - 1, -1):
        with pytest.raises(ScheduleError, match="no pair"):
            dataclasses.replace(table, pairs=(frozenset({bad}), frozenset())).validate()
    with pytest.raises(ScheduleError, match="its own backward"):
        dataclasses.replace(table, pairs=(frozenset(), frozenset({0}))).validate()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"name": "1f1", "stages": 2, "microbatches": 2}, "did you mean '1f1b'"),
        ({"name": "1f1b", "stages": 2, "microbatches": 2, "chunks": 2}, "has 1 chunk a rank, not 2"),
        ({"name": "1f1b", "stages": 2, "microbatches": 2, "group": 2}, "no groups"),
        ({"name": "interleaved", "stages": 4, "microbatches": 8, "group": 3}, "group of 3 microbatches is smaller"),
        ({"name": "1f1b", "stages": 0, "microbatches": 2}, "at least 1"),
        ({"name": "1f1b", "stages": 2, "microbatches": 2, "backward": "half"}, "'whole' or 'split'"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_with_its_rule(asked, says):
    with pytest.raises(UserError, match=says):
        make(**asked)


@SMALL
@given(p=st.integers(1, 8), m=st.integers(1, 40), v=st.integers(1, 4), extra=st.integers(0, 9), split=st.booleans())
def test_interleaved_runs_for_any_numbers(p, m, v, extra, split):
    table = make("interleaved", p, m, v, p + extra, "split" if split else "whole").validate()
    assert table.whole != split
    assert table.join_backward().validate().whole


@SMALL
@given(name=ONE_CHUNK, p=st.integers(1, 9), m=st.integers(1, 30), split=st.booleans())
def test_one_chunk_schedules_run_for_any_numbers(name, p, m, split):
    make(name, p, m, backward="split" if split else "whole").validate()


@SMALL
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 6), v=st.integers(1, 3))
def test_random_corruption_is_refused(data, p, m, v):
    """Lose, repeat or rename one action of a valid table, or run an action before its own F: never accepted."""
    table = make("interleaved", p, m, v, backward=data.draw(st.sampled_from(["whole", "split"])))
    r = data.draw(st.integers(0, p - 1))
    row = list(table.ranks[r])
    i = data.draw(st.integers(0, len(row) - 1))
    how = data.draw(st.sampled_from(["lose", "repeat", "kind", "microbatch", "swap"]))
    if how == "lose":
        del row[i]
    elif how == "repeat":
        row.insert(data.draw(st.integers(0, len(row))), row[i])
    elif how == "kind":
        others = [k for k in ("F", "B", "W", "BW") if k != row[i].kind]
        row[i] = row[i]._replace(kind=data.draw(st.sampled_from(others)))
    elif how == "microbatch":
        others = [j for j in range(-1, m + 1) if j != row[i].microbatch]
        row[i] = row[i]._replace(microbatch=data.draw(st.sampled_from(others)))
    else:
        key = row[i][1:]
        first, second = [j for j, a in enumerate(row) if a[1:] == key][:2]
        row[first], row[second] = row[second], row[first]
    with pytest.raises(ScheduleError):
        change(table, r, row).validate()


@pytest.mark.parametrize(("placement", "v"), [("linear", 1), ("loop", 1), ("loop", 3), ("v", 2)])
def test_forward_only_tables(placement, v):
    for p in (1, 2, 5):
        for m in (1, 2, 7):
            table = make_forward(placement, p, m, v).validate()
            assert table.forward_only
            assert all(len(row) == v * m for row in table.ranks)


def test_the_surplus_of_a_table_can_be_deleted():
    table = make("interleaved", 4, 12, 2, backward="split")
    assert table.only(7).validate().microbatches == 7


def test_a_bounded_stash():
    make("1f1b", 4, 8).validate(memory=4)
    with pytest.raises(ScheduleError, match=r"rank 0: F of chunk 0, microbatch 3: holds 4 microbatches, more than 3"):
        make("1f1b", 4, 8).validate(memory=3)
    make("zb-v", 4, 8).validate(memory=4)


@SMALL
@given(name=st.sampled_from(sorted(SCHEDULES)), p=st.integers(1, 5), m=st.integers(1, 12), v=st.integers(0, 4))
def test_every_named_schedule_runs_or_names_its_rule(name, p, m, v):
    if name == "auto":
        return
    try:
        table = make(name, p, m, v)
    except UserError as error:
        assert str(error).startswith(f"{name}: ")
        return
    table.validate()
    assert (table.stages, table.microbatches) == (p, m)
    assert table.chunks == (v or SCHEDULES[name].chunks)
    whole, split = make(name, p, m, v, backward="whole").validate(), make(name, p, m, v, backward="split").validate()
    assert whole.whole
    assert "BW" not in split.kinds
