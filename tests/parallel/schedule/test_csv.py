"""CSV files in PyTorch's compute-only notation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.errors import UserError
from parallel.schedule import SCHEDULES, ScheduleError, make, simulate
from parallel.schedule.dual_pipe import dual_pipe_v
from parallel.schedule.table_csv import dumps, load, loads, save

NAMES = [name for name in SCHEDULES if name not in ("auto", "adaptive-v", "dualpipe", "chimera")]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(name=st.sampled_from(NAMES), p=st.integers(2, 5), m=st.integers(1, 9), backward=st.sampled_from(["", "whole", "split"]))
def test_there_and_back(name, p, m, backward):
    table = make(name, p, m, backward=backward)
    again = loads(dumps(table))
    assert (again.ranks, again.chunks, again.microbatches) == (table.ranks, table.chunks, table.microbatches)
    assert again.places == table.places


def test_pairs_survive():
    table = dual_pipe_v(4, 10, split=False)
    again = loads(dumps(table))
    assert again.pairs == table.pairs
    assert again.ranks == table.ranks
    assert again.placement == "v"


def test_a_file_of_another_tool():
    """Written as PyTorch writes it: blank cells where a rank is idle."""
    text = "0F0,0F1,,,0I0,0W0,0B1\n,1F0,1B0,1F1,1I1,1W1,\n"
    table = loads(text)
    assert (table.stages, table.chunks, table.microbatches, table.placement) == (2, 1, 2, "linear")
    assert simulate(table).makespan > 0
    assert [str(a.kind) for a in table.ranks[0]] == ["F", "F", "B", "W", "BW"]


def test_a_file_as_a_schedule(tmp_path):
    path = save(make("zb-v", 4, 8), tmp_path / "mine.csv")
    assert make(path, 4, 8).ranks == load(path).ranks == make("zb-v", 4, 8).ranks
    with pytest.raises(UserError, match=r"holds 4 ranks x 2 chunks and 8 microbatches; asked were 2 ranks and 8"):
        make(path, 2, 8)
    with pytest.raises(UserError, match="x 3 chunks"):
        make(path, 4, 8, chunks=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no actions"),
        ("0F0,0X0\n", "rank 0: '0X0' is no action"),
        ("0F0,0SEND_F0\n", "no sends"),
        ("0F0,2F0,0B0,2B0\n1F0,1B0\n", "do not divide"),
        ("0F0,0B0,3F0,3B0,\n1F0,1B0,4F0,4B0\n2F0,2B0,5F0,5B0\n6F0,6B0,8F0,8B0\n7F0,7B0\n", "do not divide"),
        ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", "no known placement"),
        ("0F0,0B0\n1F0\n", "rank 1: B of chunk 0, microbatch 0: is missing"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "a second time"),
        ("0B0,0F0\n1F0,1B0\n", "comes before its F"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n", "deadlock"),
        ("(0F0;0B0)OVERLAP_F_B\n1F0,1B0\n", "its own backward"),
        ("0F0,0B0\n999999999F0,1B0\n", "stage 999999999 cannot be among 4 actions"),
        ("0F0,0B0\n1F888888888,1B0\n", "microbatch 888888888 cannot be among 4 actions"),
        ("0F" + "9" * 5000, "is no action"),
        ("\x00\x01" * 500, "is no action"),
    ],
)
def test_a_wrong_file_is_refused(text, says):
    with pytest.raises((UserError, ScheduleError), match=says):
        loads(text)


def test_a_missing_file():
    with pytest.raises(UserError, match="cannot read the schedule"):
        make("no/such/file.csv", 2, 2)


def test_a_byte_order_mark_and_a_binary_file(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_bytes(b"\xef\xbb\xbf" + dumps(make("1f1b", 2, 4)).encode())
    assert load(file).ranks == make("1f1b", 2, 4).ranks
    file.write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="no text but a binary file"):
        load(file)


def test_two_copies_cannot_be_written():
    with pytest.raises(UserError, match="two copies"):
        dumps(make("dualpipe", 4, 8))
