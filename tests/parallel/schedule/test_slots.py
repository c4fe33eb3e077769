"""Buffer slots by lifetime, and the rows of integers that the executor scans."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.schedule import make, make_forward, pack
from parallel.schedule.slots import CLASSES, JOINT_FIELDS, MOVES, RANK_FIELDS, USES, allocate, lower
from tests.parallel.by_hand import v_table

SMALL = settings(max_examples=40, deadline=None, derandomize=True)
SHAPES = st.sampled_from(["pairs", "single"])
COLUMN = {field: i for i, field in enumerate(RANK_FIELDS)}
JOINT = {field: i for i, field in enumerate(JOINT_FIELDS)}


@st.composite
def tables(draw):
    name = draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "interleaved", "v", "forward"]))
    p, m, backward = draw(st.integers(1, 5)), draw(st.integers(1, 12)), draw(st.sampled_from(["whole", "split"]))
    if name == "v":
        return v_table(p, m, backward)
    if name == "forward":
        placement, v = draw(st.sampled_from([("linear", 1), ("loop", 3), ("v", 2)]))
        return make_forward(placement, p, m, v)
    chunks, group = (draw(st.integers(1, 3)), p + draw(st.integers(0, 3))) if name == "interleaved" else (0, 0)
    return make(name, p, m, chunks, group, backward)


# ----------------------------------------------------------------------------------------------- allocation
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=25))
def test_a_slot_is_never_used_twice_at_once_and_no_slot_is_wasted(spans):
    lives = {(0, i): (first, first + length) for i, (first, length) in enumerate(spans)}
    slots, n = allocate(lives)
    most = max((sum(a <= t <= b for a, b in lives.values()) for t in range(45)), default=0)
    assert n == most
    assert set(slots) == set(lives)
    assert set(slots.values()) == set(range(n))
    for one, (first, last) in lives.items():
        for other, (a, b) in lives.items():
            assert one == other or slots[one] != slots[other] or last < a or b < first


@SMALL
@given(table=tables(), shape=SHAPES)
def test_every_class_gets_as_many_slots_as_the_tick_simulator_counts(table, shape):
    ticks = pack(table, shape)
    rows = lower(ticks)
    assert {name: n for name, n in rows.slots.items() if name in ticks.peaks()} == ticks.peaks()
    assert set(rows.slots) == set(CLASSES)
    assert all(n == 0 for name, n in rows.slots.items() if name not in ticks.peaks())
    for i, field in enumerate(RANK_FIELDS):  # within the buffers, of which the last slot is the waste bin
        name = next((c for c in CLASSES if field in (*(f"{k}_{c}" for k in "FBW"), *(f"{c}_{m}" for m in MOVES))), None)
        name = "g" if field == "head_g" else name
        assert rows.ranks[..., i].min() >= 0
        if name:
            assert rows.ranks[..., i].max() <= rows.slots[name]


# ----------------------------------------------------------------------------------------------- a run by hand
class Machine:
    """Runs rows as the executor does, with names of values instead of values: every read must find what it expects."""

    def __init__(self, rows, table, forward_only):
        self.rows, self.table, self.forward_only = rows, table, forward_only
        self.buffers = [{c: [None] * (rows.slots[c] + 1) for c in CLASSES} for _ in range(table.stages)]
        self.done = []

    def at(self, r, row, kind, name):
        """What lies in the slot of class `name` that the row gives for this kind."""
        return self.buffers[r][name][row[COLUMN[f"{kind}_{name}"]]]

    def put(self, r, name, slot, value):
        self.buffers[r][name][slot] = value

    def deliver(self, row, name, sent):
        for way in self.rows.moves[name]:
            step = dict(right=1, left=-1, stay=0)[way]
            for r in range(self.table.stages):
                self.put(r, name, row[r][COLUMN[f"{name}_{way}"]], sent[(r - step) % self.table.stages])

    def run(self):
        p, table, sent = self.table.stages, self.table, [None] * self.table.stages
        for row, joint in zip(self.rows.ranks, self.rows.joint):
            busy = {kind: [int(c) for c in row[:, COLUMN[f"{kind}_busy"]]] for kind in "FBW"}
            unit = lambda r, kind, row=row: (
                table.stage_of(r, row[r][COLUMN[f"{kind}_c"]]),
                int(row[r][COLUMN[f"{kind}_m"]]),
            )
            self.deliver(row, "g", sent)
            made = [None] * p
            left = None
            for r in range(p):
                if busy["F"][r]:
                    s, m = unit(r, "F")
                    if table.before(s) < 0:
                        assert row[r][COLUMN["F_first"]] == 1
                        assert (joint[JOINT["enter"]], r) == (m, self.rows.first_rank)
                    else:
                        assert row[r][COLUMN["F_first"]] == 0
                        assert self.at(r, row[r], "F", "x") == ("y", table.before(s), m)
                    made[r] = ("y", s, m)
                    self.done.append(("F", s, m))
                    if table.after(s) < 0:
                        assert (joint[JOINT["leave"]], r, left) == (m, self.rows.last_rank, None)
                        left = m
                    for name in ("a", "aw"):
                        self.put(r, name, row[r][COLUMN[f"F_{name}"]], (name, s, m))
            assert (left is None) == (joint[JOINT["leave"]] < 0)
            self.deliver(row, "x", made)
            if not self.forward_only:
                for r in range(p):
                    self.put(r, "g", row[r][COLUMN["head_g"]], ("loss", left))
                sent = self.backward(row, joint, busy, unit)
        return self.done

    def backward(self, row, joint, busy, unit):
        table, sent = self.table, [None] * self.table.stages
        fused = not self.rows.slots["aw"]
        for r in range(table.stages):
            if busy["B"][r]:
                s, m = unit(r, "B")
                after = table.after(s)
                assert self.at(r, row[r], "B", "g") == (("dx", after, m) if after >= 0 else ("loss", m))
                assert self.at(r, row[r], "B", "a") == ("a", s, m)
                assert fused or self.at(r, row[r], "B", "aw") == ("aw", s, m)
                self.put(r, "cut", row[r][COLUMN["B_cut"]], ("cut", s, m))
                sent[r] = ("dx", s, m)
                self.done.append(("B", s, m))
                if table.before(s) < 0:
                    assert joint[JOINT["exit"]] == m
        for r in range(table.stages):
            if busy["W"][r]:
                s, m = unit(r, "W")
                if not fused:
                    assert self.at(r, row[r], "W", "aw") == ("aw", s, m)
                    assert self.at(r, row[r], "W", "cut") == ("cut", s, m)
                self.done.append(("W", s, m))
        return sent


@SMALL
@given(table=tables(), shape=SHAPES)
def test_the_rows_run_every_action_once_on_what_it_needs(table, shape):
    ticks = pack(table, shape)
    done = Machine(lower(ticks), table, ticks.forward_only).run()
    assert sorted(done) == sorted(ticks.at)


@SMALL
@given(table=tables(), ticks_more=st.integers(0, 5), slots_more=st.integers(0, 3))
def test_padded_rows_do_the_same_work(table, ticks_more, slots_more):
    ticks = pack(table)
    rows = lower(ticks)
    slots = {name: n + slots_more * (n > 0) for name, n in rows.slots.items()}
    wider = rows.padded(ticks.length + ticks_more, slots, dict(x=MOVES, g=MOVES))
    assert wider.ranks.shape == (ticks.length + ticks_more, *rows.ranks.shape[1:])
    assert wider.ranks.dtype == rows.ranks.dtype
    assert wider.joint.dtype == rows.joint.dtype
    assert Machine(wider, table, ticks.forward_only).run() == Machine(rows, table, ticks.forward_only).run()
    assert (wider.joint[ticks.length :] == -1).all()
    assert not wider.ranks[ticks.length :, :, [COLUMN[f"{kind}_busy"] for kind in "FBW"]].any()


def test_what_is_idle_reads_and_writes_the_waste_bin():
    ticks = pack(make("1f1b", 3, 4))
    rows = lower(ticks)
    busy = ticks.busy
    for i, kind in enumerate("FBW"):
        for name in USES[kind]:
            assert (rows.ranks[..., COLUMN[f"{kind}_{name}"]][~busy[..., i]] == rows.slots[name]).all()


def test_the_machine_notices_a_wrong_slot():
    """The checks above can fail: one slot number off, in each class."""
    table = make("interleaved", 2, 4, 2, backward="split")
    rows = lower(pack(table))
    for kind, name in (("F", "x"), ("B", "a"), ("B", "aw"), ("B", "g"), ("W", "cut")):
        wrong = rows.ranks.copy()
        t, r = next(
            (t, r)
            for t, r in np.argwhere(wrong[..., COLUMN[f"{kind}_busy"]] > 0)
            if wrong[t, r, COLUMN[f"{kind}_{name}"]] < rows.slots[name]
        )
        wrong[t, r, COLUMN[f"{kind}_{name}"]] += 1
        with pytest.raises(AssertionError):
            Machine(dataclasses.replace(rows, ranks=wrong), table, False).run()
