"""The planner on published runs: its errors, what it reads of a row, what it picks of the layouts measured."""

import csv
import json
import random
from collections import Counter

import numpy as np
import pytest

from llm import published
from llm.plan_errors import choices, plan_errors, predict, predict_run, summary
from parallel import bubble, frameworks
from parallel.errors import UserError
from parallel.schedule.simulate import simulate
from tests.jobs import main

MEASURED = """
id suite source verified step_time_s step_kind tokens_per_s_per_gpu tflops_per_gpu flops_convention mfu_pct hfu_pct mem_gib
"""


@pytest.fixture(scope="module")
def predictions():
    return predict(published.read(published.RUNS))


def test_errors_stay_below_their_ceilings(predictions):
    """Percent of step time on rows that no fit used, and of the fullest GPU's memory."""
    table = {entry["suite"]: entry for entry in summary(predictions, published.read(published.RUNS))}
    assert table["all"]["mape"] <= 5.5 < table["all"]["baseline_mape"] / 3
    assert table["all, complete"]["mape"] <= 4.5 and table["all, complete"]["median"] <= 3.1
    assert 80 <= table["all"]["coverage"] <= 98 and 80 <= table["rows"]["coverage"] <= 98
    assert table["vtrain_single"]["mape"] <= 8.4 and table["vtrain_multi"]["mape"] <= 5
    for entry in table.values():
        if entry.get("in_all") and entry["n"] >= 5:
            assert entry["mape"] <= 10 and entry["mape"] < entry["baseline_mape"], entry
    assert table["all"]["memory_mape"] <= 4 and table["all"]["memory_not_under"] >= 90


def test_no_counted_row_is_refused(predictions):
    assert not [p.id for p in predictions if p.counted and p.refused]
    assert all("a mixture of experts, and no preset" in p.refused for p in predictions if p.refused)


def test_a_fit_uses_a_fifth_of_a_suite_at_most(predictions):
    """Of the counted rows, where a suite has any."""
    used = Counter(p.suite for p in predictions if p.fitted)
    counted = Counter(p.suite for p in predictions if p.counted)
    known = Counter(p.suite for p in predictions if not p.refused)
    assert len(set(frameworks.fitted()["rows"])) == len(frameworks.fitted()["rows"]) == sum(used.values())
    assert all(n <= max(1, (counted[suite] or known[suite]) // 5) for suite, n in used.items())


def test_the_planner_picks_a_layout_as_good_as_the_best_measured(predictions):
    """The four vTrain models: the regret of the first choice among the layouts that were measured, percent."""
    regrets = [choice["regret_pct"] for choice in choices(predictions) if choice["suite"] == "vtrain_multi"]
    assert len(regrets) == 4 and np.mean(regrets) <= 2 and max(regrets) < 6


ZERO_BUBBLE = {  # arXiv 2401.10241, table 4: microbatches, samples/GPU/s of ZB-2p, of 1F1B
    "1.5B": ((24, 32, 64), (14.5, 14.8, 14.9), (11.8, 12.5, 13.6)),
    "6.2B": ((24, 32, 64), (4.32, 4.35, 4.39), (3.50, 3.70, 4.03)),
    "14.6B": ((48, 64, 128), (1.81, 1.83, 1.85), (1.40, 1.49, 1.64)),
    "28.3B": ((96, 128, 256), (0.99, 1.00, 1.00), (0.76, 0.80, 0.88)),
}


@pytest.mark.parametrize("size", ZERO_BUBBLE)
def test_zero_bubble_over_one_f_one_b(size):
    """The ratio of their throughputs within 3 % in all twelve pairs."""
    row = next(r for r in published.read(published.RUNS) if r["id"].startswith(f"zb-{size}-"))
    for m, zero, plain in zip(*ZERO_BUBBLE[size]):
        time = {}
        for schedule in ("ZB-2p", "1F1B"):
            changed = row | dict(schedule=schedule, vp="1", gbs_seqs=str(m * int(row["mbs"])))
            time[schedule] = predict_run(published.parse(changed)).step_time_s
        assert time["1F1B"] / time["ZB-2p"] == pytest.approx(zero / plain, rel=0.03)


@pytest.mark.parametrize(
    ("p", "m", "costs", "comm", "rates"),
    [
        (8, 32, (18513, 18086, 9331), 626, {"1f1b": 0.1985, "zb-h1": 0.1242, "zb-2p": 0.0039}),
        (8, 64, (29935, 29621, 19388), 535, {"1f1b": 0.1091, "zb-h1": 0.0554, "zb-2p": 0.0010}),
        (16, 64, (11307, 11254, 8101), 379, {"1f1b": 0.2082, "zb-h1": 0.1088, "zb-2p": 0.0054}),
    ],
)
def test_bubbles_are_those_of_the_simulator_and_of_the_paper(p, m, costs, comm, rates):
    """arXiv 2401.10241, tables 5 and 9: pass times in microseconds, bubble rates within half a point."""
    for name, rate in rates.items():
        found = bubble.run(name, p, m, 1, p, costs, machine=bubble.Machine(delay=comm))
        table = bubble.make(name, p, m, 1, tuple(round(c / max(costs), 4) for c in costs) if name == "zb-2p" else (1, 1, 1))
        simulated = simulate(table, np.outer(np.ones(p), costs), comm)
        seconds = simulated.rank_span if name.startswith("zb") else simulated.makespan
        assert found.bubble == pytest.approx(1 - m * sum(costs) / seconds, abs=1e-9)
        assert found.bubble == pytest.approx(rate, abs=0.005)


def test_only_inputs_are_read(tmp_path):
    rows = [row for i, row in enumerate(published.read(published.RUNS)) if row["suite"] != "vtrain_single" or i % 9 == 0]
    blind = [
        row | dict.fromkeys(MEASURED.split(), "") | {"notes": "".join(c for c in row["notes"] if not c.isdigit())}
        for row in rows
    ]
    files = []
    for name, some in (("all", rows), ("blind", blind)):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            out = csv.DictWriter(file, published.COLUMNS)
            out.writeheader()
            out.writerows(some)
        plan_errors(str(tmp_path / f"{name}.csv"), predictions=str(tmp_path / f"{name}-out.csv"))
        files.append((tmp_path / f"{name}-out.csv").read_text())
    assert files[0] == files[1]


def test_any_cell_may_be_empty_or_nonsense():
    rows, draw = published.read(published.RUNS), random.Random(0)
    rows = [row for row in rows if row["suite"] != "vtrain_single"]
    odd = ("", "?", "-1", "0", "1e9", "3.5", "nan", "none", "unknown thing")
    some = []
    for _ in range(250):
        row = dict(draw.choice(rows))
        for column in draw.sample(published.COLUMNS, draw.choice((1, 3, 8))):
            row[column] = "" if draw.random() < 0.6 else draw.choice(odd)
        some.append(row)
    done = predict(some)
    assert all((p.estimate is None) == bool(p.refused) for p in done)
    assert sum(not p.refused for p in done) > 60
    summary(done)


def test_files_that_are_no_table(tmp_path):
    file = tmp_path / "runs.csv"
    for content, says in ((b"", "header"), (bytes(range(256)), "UTF-8"), (b"a,b\n1,2\n", "header")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=says):
            plan_errors(str(file))
    file.write_text(",".join(published.COLUMNS) + "\n")
    table, _ = plan_errors(str(file))
    assert table == []


def test_one_suite_as_json():
    result = main("plan_errors", "--suite=bloom", "--json")
    table = json.loads(result.stdout)
    assert table[0]["suite"] == "bloom" and set(table[0]) >= {"n", "fitted", "refused", "mape", "coverage"}
    assert table[0]["memory_n"] == 10 and table[0]["complete_n"] <= table[0]["n"]
    assert main("plan_errors", "--suite=blom").returncode == 2


def test_an_aim_that_was_missed_is_said(monkeypatch):
    monkeypatch.setattr("llm.plan_errors.AIMS", (("all", "mape", 0.5), ("all", "median", 99.0), ("elsewhere", "mape", 1.0)))
    _, text = plan_errors(suite="bloom")
    said = [line for line in text.splitlines() if "aim" in line]
    assert [line.endswith("(aim 0.5, missed)") for line in said] == [True, False] and said[1].endswith("(aim 99)")


def test_tables_of_choices_and_memory():
    found, text = plan_errors(suite="bloom", table="choices")
    assert all(c["regret_pct"] >= 0 and c["layouts"] >= 3 for c in found) and "regret mean" in text
    lines, text = plan_errors(suite="bloom", table="memory")
    assert len(lines) == 10 and set(lines[0]) >= {"id", "measured", "predicted_gib", "error_pct"} and "10 rows" in text
    with pytest.raises(UserError, match="choices"):
        plan_errors(table="choice")
