"""Pipelined training equals the plain step on one device: loss, every gradient, gradient norm, parameters after one SGD step.

fp32, 1e-5 relative; packed rows with unequal token counts, dropout and z-loss on, and every idle slot and unwritten buffer
full of NaN, so that anything read from one would show."""

import dataclasses

import jax
import numpy as np
import pytest
import reference
from parity import LENGTH, ROWS, VOCAB, compiled, program_of, random_params, run, shared_plan, wanted, worst
from parity_cases import CASES, Case, missing_pairs

from llm.model import Transformer
from llm.step import Program
from parallel import schedule
from parallel.schedule.slots import RANK_FIELDS


@pytest.fixture(scope="module")
def rows() -> dict:
    return reference.batch(ROWS, LENGTH, VOCAB)


def test_every_pair_of_values_occurs():
    assert not missing_pairs()
    assert any(np.prod(list(c.sizes.values())) == 8 and min(c.sizes.values()) == 2 for c in CASES)


SMOKE = CASES[:2] + CASES[5:6]  # of each idle mode, fused and split, with every axis


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.smoke if c in SMOKE else ()) for c in CASES], ids=str)
def test_parity(case, rows):
    groups: dict[bool, list[Program]] = {}
    for one in case.schedules():
        program = program_of(one)
        groups.setdefault(program.tick_table.fused, []).append(program)
    for programs in groups.values():
        plan = shared_plan(programs)
        step = compiled(programs[0])
        for program in programs:
            assert {k: a.shape for k, a in program.plan.table.items()} == {k: a.shape for k, a in plan.table.items()}
            params = random_params(program)
            got, want = run(programs[0], step, params, rows, program.device_table), wanted(program, params, rows)
            differences = reference.difference(want, got)
            assert max(differences.values()) < 1e-5, (program.table.name, differences)


# ------------------------------------------------------------------------------------------- the matrix can fail
BASE = Case("interleaved/2", "split", "pipe2 data2", "4p", "none", "skip", "even", "llama", "tied", "zero0")


@pytest.fixture(scope="module")
def base(rows):
    program = program_of(BASE)
    params = random_params(program)
    return program, compiled(program), params, wanted(program, params, rows)


def changed_row(program: Program, field: str, change, which: int = -2) -> dict:
    """The table with one field of one busy row changed."""
    fields = RANK_FIELDS
    ranks = program.plan.rows.ranks.copy()
    busy = np.argwhere(ranks[..., fields.index(f"{field[0]}_busy")] == 1)
    tick, rank = busy[which]
    column = fields.index(field)
    ranks[tick, rank, column] = change(ranks[tick, rank, column])
    return dict(program.plan.table, ranks=ranks)


@pytest.mark.parametrize("idle", ["skip", "compute"])
def test_mutants_are_caught(idle, base, rows):
    program, step, params, want = base
    if idle == "compute":
        program = program_of(dataclasses.replace(BASE, idle=idle))
        step = compiled(program)
    assert worst(want, run(program, step, params, rows)) < 1e-5
    slots = program.plan.rows.slots
    mutants = {
        "B reads another stash slot": changed_row(program, "B_a", lambda i: (i + 1) % slots["a"]),
        "W reads another stash slot": changed_row(program, "W_aw", lambda i: (i + 1) % slots["aw"]),
        "W takes another's hand-over": changed_row(program, "W_cut", lambda i: (i + 1) % (slots["cut"] + 1)),
        "F takes the next microbatch": changed_row(program, "F_m", lambda m: m - 1),
        "B takes the next microbatch": changed_row(program, "B_m", lambda m: m - 1),
        "W adds to another chunk": changed_row(program, "W_c", lambda c: 1 - c),
        "F runs another chunk": changed_row(program, "F_c", lambda c: 1 - c),
    }
    for name, table in mutants.items():
        assert worst(want, run(program, step, params, rows, table)) > 1e-3, name


def test_a_missing_reduction_is_caught(base, rows, monkeypatch):
    program, _, params, want = base
    specs = jax.tree.map(lambda s: s, program.specs)
    specs["layers"]["up"]["kernel"] = dataclasses.replace(specs["layers"]["up"]["kernel"], sum_axes=("replica",))
    broken = program_of(BASE)
    vars(broken)["specs"] = specs
    differences = reference.difference(want, run(broken, compiled(broken), params, rows))
    wrong = {name for name, d in differences.items() if d > 1e-3}
    assert "grads/layers/up/kernel" in wrong and "grads/layers/down/kernel" not in wrong, differences


def test_poison_changes_nothing(base, rows):
    """NaN in unwritten buffers and idle slots: bitwise the same results."""
    program, step, params, _ = base
    poisoned = program_of(BASE)
    vars(poisoned)["plan"] = dataclasses.replace(poisoned.plan, poison=True)
    clean, dirty = run(program, step, params, rows), run(poisoned, compiled(poisoned), params, rows)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_a_step_that_is_not_finite_is_skipped(base, rows):
    program, _, params, _ = base
    bad = jax.tree.map(np.copy, params)
    bad["layers"]["up"]["kernel"][0, 0, 0] = np.nan
    state = dict(reference.place(program, bad), step=np.int32(3), skipped=np.int32(0))
    before = jax.tree.map(np.asarray, state)
    after, metrics = program.train_step(state, program.put(rows))
    assert int(metrics["skipped"]) == 1 and int(after["step"]) == 4 and int(after["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before["params"], after["params"])
    jax.tree.map(np.testing.assert_array_equal, before["optimizer"], after["optimizer"])


def test_forward_only_equals_the_plain_model(base, rows):
    program, _, params, _ = base
    state = reference.place(program, params)
    out = program.eval_step(state["params"], program.put(rows))
    model = Transformer(dataclasses.replace(program.config.model, dropout=0.0), np.float32, 1)
    side = dict(rows, key=np.zeros((ROWS, 2), np.uint32))
    logits = np.asarray(reference.forward(model, params, side))
    logp = jax.nn.log_softmax(logits)[np.arange(ROWS)[:, None], np.arange(LENGTH), rows["targets"]]
    np.testing.assert_allclose(out["nll"], -(rows["weights"] * logp).sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out["tokens"], rows["weights"].sum(1))


def test_forward_only_table_is_a_schedule():
    assert schedule.make_forward("loop", 2, 3, 2).forward_only
