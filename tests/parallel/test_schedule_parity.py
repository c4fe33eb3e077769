"""Every executable schedule trains exactly like the plain step, W split and V placement included.

In idle mode skip the table is an argument, so all schedules of one placement share a compiled program, in both shapes of
ticks and both packings; idle mode compute gets a sample."""

import dataclasses

import pytest
import reference
from parity import LENGTH, ROWS, VOCAB, compiled, program_of, random_params, run, shared_plan, wanted
from parity_cases import Case

from llm.step import COSTS
from parallel import pipeline, schedule
from parallel.schedule import table_csv
from parallel.schedule.registry import SCHEDULES

PLACEMENTS = {
    "linear": ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"),
    "loop": ("interleaved", "looped-bfs", "gis", "gis-h"),
    "v": ("zb-v", "v-half", "v-min", "adaptive-v", "dualpipe-v"),
}
FUSED = {  # schedules of which a packing has every W in its B's tick
    ("v", "pipe4"): {"dualpipe-v"},
    ("linear", "pipe2 data2"): set(PLACEMENTS["linear"]),
    ("v", "pipe2 data2"): {"zb-v", "v-half", "dualpipe-v"},
}
CASE = Case("", "split", "pipe4", "%p", "selective", "skip", "uneven", "llama", "tied", "zero0")


@pytest.fixture(scope="module")
def rows() -> dict:
    return reference.batch(ROWS, LENGTH, VOCAB)


def programs_of(case: Case, name: str) -> list:
    """The programs of a schedule in both shapes of ticks and both packings."""
    programs = []
    for shape in ("pairs", "single"):
        for order in ("keep", "retime"):
            program = program_of(dataclasses.replace(case, schedule=name))
            ticks = schedule.pack(program.table, shape, order).validate()
            vars(program)["tick_table"] = ticks
            programs.append(program)
    return programs


def check(programs: list, rows: dict) -> None:
    shared_plan(programs)
    step = compiled(programs[0])
    params = random_params(programs[0])
    want = wanted(programs[0], params, rows)
    for program in programs:
        differences = reference.difference(want, run(programs[0], step, params, rows, program.device_table))
        ticks = program.tick_table
        assert max(differences.values()) < 1e-5, (ticks.table.name, ticks.shape, differences)


def test_every_executable_schedule_is_here():
    executable = {name for name, s in SCHEDULES.items() if s.executable} - {"auto"}
    assert executable == {name for names in PLACEMENTS.values() for name in names}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mesh, microbatches", [("pipe4", "%p"), ("pipe2 data2", "<p")])
def test_schedules(placement, mesh, microbatches, rows):
    case = dataclasses.replace(CASE, mesh=mesh, microbatches=microbatches)
    programs = [p for name in PLACEMENTS[placement] for p in programs_of(case, name)]
    for fused in (False, True):  # where every W falls into its B's tick, B and W are one program: another one to compile
        same = [p for p in programs if p.tick_table.fused == fused]
        if same:
            check(same, rows)
    names = {p.table.name for p in programs if p.tick_table.fused}
    assert names == FUSED.get((placement, mesh), set())


@pytest.mark.parametrize("name, shape", [("zb-h1", "pairs"), ("zb-v", "pairs"), ("dualpipe-v", "single")])
def test_schedules_that_compute_in_idle_slots(name, shape, rows):
    program = program_of(dataclasses.replace(CASE, schedule=name, idle="compute", layers="even"))
    vars(program)["tick_table"] = schedule.pack(program.table, shape)
    assert len(program.tick_table.phases()) <= 8
    vars(program)["plan"] = dataclasses.replace(program.plan, poison=True)
    params = random_params(program)
    differences = reference.difference(wanted(program, params, rows), run(program, compiled(program), params, rows))
    assert max(differences.values()) < 1e-5, differences


def test_a_table_from_a_file_and_a_searched_one(rows, tmp_path, monkeypatch):
    """A CSV file of the user's own runs as it stands; `auto` trains with the table that costs least in ticks."""
    monkeypatch.chdir(tmp_path)
    table_csv.save(schedule.make("zb-v", 4, 6), "mine.csv")
    mine = program_of(dataclasses.replace(CASE, schedule="mine.csv", backward="auto"))
    auto = program_of(dataclasses.replace(CASE, schedule="auto", backward="auto"))
    costs = COSTS["selective"]
    best = min(
        schedule.best_packing(schedule.make(name, 4, 6, costs=costs), costs, "skip").cost(*costs, idle="skip")
        for names in PLACEMENTS.values()
        for name in names
    )
    assert auto.tick_table.cost(*costs, idle="skip") <= best + 1e-9
    assert mine.table.ranks == schedule.make("zb-v", 4, 6).ranks
    for program in (mine, auto):
        params = random_params(program)
        differences = reference.difference(wanted(program, params, rows), run(program, compiled(program), params, rows))
        assert max(differences.values()) < 1e-5, differences


def test_slots_equal_the_simulated_peaks():
    for names in PLACEMENTS.values():
        for name in names:
            ticks = schedule.pack(schedule.make(name, 4, 6, backward="split"))
            peaks = ticks.peaks()
            assert {k: n for k, n in pipeline.lower(ticks).slots.items() if k in peaks} == peaks, name
