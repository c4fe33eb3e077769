"""The planner: its parts against numbers known by hand, its errors on published runs, what it reads, what it picks."""

import csv
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from llm import costs, overrides, plan, published
from llm.compile import TARGETS
from llm.families import preset
from llm.layout import as_config, possible
from llm.plan_errors import choices, plan_errors, predict, predict_run, summary
from parallel import bubble, communication, deviceless, frameworks, layouts, reliability
from parallel.cluster import CLUSTERS, GPUS, find_cluster, find_gpu
from parallel.errors import UserError
from parallel.operator_time import matmul
from parallel.planner import Layout, estimate
from parallel.schedule.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "experiments/configs/llama3_70b.py"
MEASURED = """
id suite source verified step_time_s step_kind tokens_per_s_per_gpu tflops_per_gpu flops_convention mfu_pct hfu_pct mem_gib
"""


def main(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "main.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


# ------------------------------------------------------------------------------------------------------------- the parts
@pytest.mark.smoke
def test_matmuls_are_those_measured_on_an_a100():
    """cuBLASLt with random data, Azure guide: TFLOP/s by size."""
    for n, tflops in ((1024, 119), (4096, 228), (8192, 254), (16384, 256)):
        assert 2e-12 * n**3 / matmul(n, n, n, GPUS["A100-80"], "bf16") == pytest.approx(tflops, rel=0.06)


def test_the_measured_curve_of_a_collective_comes_back():
    """Bus bandwidth of 64 MB over the eight GPUs of an ND A100 v4: 166.6 GB/s."""
    time = communication.all_reduce(64e6, 8, 1, CLUSTERS["nd-a100-v4"])
    assert 2 * 7 / 8 * 64e6 / time == pytest.approx(166.6e9, rel=0.12)
    assert communication.all_reduce(64e6, 1, 1, CLUSTERS["nd-a100-v4"]) == 0


def test_rings_of_one_node_share_its_network():
    machine = CLUSTERS["nd-h100-v5"]
    alone, shared = (communication.all_reduce(4e9, 64, stride, machine) for stride in (1, 8))
    assert 4 < shared / alone < 9


@pytest.mark.parametrize(
    ("name", "m", "chunks", "share"), [("1f1b", 8, 1, 3 / 11), ("1f1b", 4, 1, 3 / 7), ("interleaved", 8, 2, 1.5 / 9.5)]
)
def test_bubbles_of_equal_stages(name, m, chunks, share):
    """(p-1) / (m + p-1) for 1F1B, (p-1)/v for interleaved."""
    assert bubble.run(name, 4, m, chunks, 8, (1, 1, 1)).bubble == pytest.approx(share)


def test_each_rank_holds_what_its_place_asks():
    assert bubble.run("1f1b", 4, 8, 1, 4, (1, 1, 1)).held == (4, 3, 2, 1)
    assert bubble.run("1f1b", 4, 2, 1, 4, (1, 1, 1)).held == (2, 2, 2, 1)
    assert bubble.run("gpipe", 4, 8, 1, 4, (1, 1, 1)).held == (8, 8, 8, 8)


@pytest.mark.parametrize("ticks", [False, True])
@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 2)])
def test_a_long_step_follows_from_short_ones(name, v, ticks):
    machine = bubble.Machine(ticks=ticks)
    long = bubble.run(name, 4, 45, v, 16, (1, 1.3, 0.8), (0.1, 0, 0), (0.5, 0.5, 0.5), machine=machine)
    costs_s3 = np.outer(bubble.spread_layers(16, 4 * v), (1, 1.3, 0.8))
    vocabulary = 0.4 if ticks else 0.0
    if not ticks:
        costs_s3[0, 0] += 0.1
        costs_s3[-1] += 0.5
    exact = bubble._simulate(name, 4, 45, v, bubble.spread_layers(16, 4 * v), costs_s3, vocabulary, machine)
    assert long.seconds == pytest.approx(exact.seconds, rel=1e-6)
    assert long.work == pytest.approx(exact.work, rel=1e-6)


@pytest.mark.parametrize(
    ("layers", "stages", "ends"), [(22, 8, 1), (30, 8, 1), (126, 16, 1), (80, 12, 0), (7, 7, 0), (5, 4, 0)]
)
def test_every_layer_is_in_one_stage(layers, stages, ends):
    counts = bubble.spread_layers(layers, stages, ends)
    assert sum(counts) == layers and max(counts) - min(counts) <= 1 + ends and min(counts) >= 0


def test_the_closed_form_ranks_like_the_table():
    for p, m, v in ((4, 16, 2), (8, 32, 4), (2, 8, 1)):
        machine = bubble.Machine(ticks=True)
        table = bubble.run("interleaved", p, m, v, 4 * p * v, (1, 1, 1), machine=machine)
        closed = bubble.quick(p, m, v, 4 * p * v, (1, 1, 1), (0, 0, 0), False)
        assert closed.seconds == pytest.approx(table.seconds, rel=0.03)
        assert closed.held[0] == pytest.approx(max(table.held), rel=0.1)


def test_failures_and_checkpoints_of_a_large_run():
    """Llama 3: 3.09 hours between failures on 2,048 nodes; Daly's interval is near Young's for short writes."""
    failure = reliability.mean_time_to_failure(2048)
    assert failure / 3600 == pytest.approx(3.09, rel=0.01)
    assert reliability.checkpoint_interval(10, failure) == pytest.approx((2 * 10 * failure) ** 0.5, rel=0.03)
    assert 0.9 < reliability.goodput(10, failure, reliability.checkpoint_interval(10, failure)) < 1


def test_hardware_has_sources_and_names_that_sources_write():
    assert all(gpu.source and gpu.peak["bf16"] for gpu in GPUS.values())
    assert all(cluster.source for cluster in CLUSTERS.values())
    names = {
        "A100-SXM-80GB": "A100-80",
        "A100-40GB": "A100-40",
        "H100-96GB-HBM2e (500W)": "H100-96",
        "GB300": "GB300",
        "H200": "H200",
    }
    assert {words: find_gpu(words).name for words in names} == names
    with pytest.raises(UserError, match="TPU v5p"):
        find_gpu("TPU v5p")


@pytest.mark.parametrize("name, target", TARGETS.items())
def test_a_gpu_has_the_memory_that_the_compiler_counts(name, target):
    """Else `plan` proposes what `compile` says does not fit."""
    compiled = deviceless.TARGETS[target].memory_bytes / 2**30
    assert compiled - 0.5 < GPUS[name].hbm_gib <= compiled + 0.02


def test_a_cluster_from_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"like": "nd-h100-v5", "nic_gbs": 100, "gpu": {"hbm_gib": 60}}))
    mine = find_cluster(str(file))
    assert (mine.nic_gbs, mine.gpu.hbm_gib, mine.gpu.peak["fp8"]) == (100, 60, 1979)
    file.write_text(json.dumps({"speed": 1}))
    with pytest.raises(UserError, match="not a description"):
        find_cluster(str(file))
    with pytest.raises(UserError, match="nd-h100-v5"):
        find_cluster("nd-h100-v4")


# ------------------------------------------------------------------------------------------------------- published runs
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


# ---------------------------------------------------------------------------------------------------------------- plans
def config(*changes: tuple[str, str]):
    return overrides.apply(overrides.load(str(ROOT / CONFIG)), changes)


@pytest.mark.smoke
def test_counts():
    assert [plan.count(text, "gpus") for text in ("512", "4M", "15T", "1.5K", "2b")] == [
        512,
        4 * 10**6,
        15 * 10**12,
        1500,
        2 * 10**9,
    ]
    for text in ("", "0", "4X", "-3"):
        with pytest.raises(UserError, match="--gpus"):
            plan.count(text, "gpus")


@pytest.mark.smoke
def test_a_plan_for_a_thousand_gpus():
    start = time.process_time()
    document, text, code = plan.plan(config(), "nd-h100-v5", 1024, 4 * 10**6, tokens=15 * 10**12)
    assert time.process_time() - start < 10
    assert code == 0 and "rounded to 488" in text and "The first wins." in text
    best = document["best"]
    assert best == document["layouts"][0] and len(document["layouts"]) > 3
    speeds = [layout["tokens_per_s_per_gpu"] for layout in document["layouts"]]
    assert speeds == sorted(speeds, reverse=True)
    for layout in document["layouts"]:
        mesh = layout["mesh"]
        assert mesh["data"] * mesh["pipe"] * mesh["tensor"] == 1024
        assert layout["rows"] == mesh["data"] * layout["microbatches"] * layout["rows_per_microbatch"]
        assert abs(layout["rows"] / 488 - 1) <= layouts.WITHIN
        assert layout["low_s"] < layout["step_time_s"] < layout["high_s"]
        assert len(layout["memory_per_rank_gib"]) == mesh["pipe"]
        assert max(layout["memory_per_rank_gib"]) == layout["peak_memory_gib"] <= document["memory_limit_gib"]
        assert set(layout["exposed_s"]) == {"tensor", "context", "expert", "pipe", "data"}
        assert 0.1 < layout["mfu"] < 0.7
        assert sum(layout["parts_s"].values()) == pytest.approx(layout["step_time_s"])
    assert 0.8 < document["run"]["goodput"] < 1 and document["run"]["days"] > 50


def test_the_trainer_takes_every_layout_that_is_found():
    """500 proposals: those that the shared check lets through are built by the trainer, and those refused are not shown."""
    draw = random.Random(1)
    model = costs.operators(preset("llama-3-8b"))
    small = dataclasses.replace(config(), model=preset("llama-3-8b"))
    from llm.step import make_table

    seen = allowed = 0
    while seen < 500:
        gpus, rows = draw.choice((8, 24, 64, 96)), draw.choice((48, 60, 128))
        some = list(layouts.proposals(model, rows, gpus, CLUSTERS["nd-h100-v5"], {}, exact=draw.random() < 0.5))
        for layout in draw.sample(some, min(20, len(some))):
            seen += 1
            if possible(small, layout):
                allowed += 1
                resolved = as_config(small, layout).validate(layout.gpus)
                assert resolved.mesh.product == gpus
                if layout.pipe * layout.microbatches < 300:
                    make_table(resolved, "compute")
    assert allowed > 400
    assert not possible(small, Layout(tensor=3, pipe=1, data=2, microbatches=1))


def test_given_fields_are_kept():
    changes = [("mesh.tensor", "8"), ("mesh.pipe", "8"), ("pipeline.chunks", "2"), ("pipeline.remat", "full")]
    document, _, code = plan.plan(config(*changes), "nd-h100-v5", 1024, 4 * 10**6, changes)
    kept = {(d["mesh"]["tensor"], d["mesh"]["pipe"], d["chunks"], d["remat"]) for d in document["layouts"]}
    assert code == 0 and kept == {(8, 8, 2, "full")}
    changes = [("pipeline.schedule", "zb-v"), ("mesh.pipe", "8")]
    document, _, code = plan.plan(config(*changes), "nd-h200-v5", 512, 4 * 10**6, changes)
    assert code == 0 and {(d["schedule"], d["chunks"], d["mesh"]["pipe"]) for d in document["layouts"]} == {("zb-v", 2, 8)}
    for name in ("dualpipe", "mine.csv"):
        with pytest.raises(UserError, match=name):
            plan.plan(config(("pipeline.schedule", name)), "nd-h100-v5", 64, 10**6, [("pipeline.schedule", name)])
    changes = [("mesh.tensor", "3")]
    with pytest.raises(UserError, match="tensor 3"):
        plan.plan(config(*changes), "nd-h100-v5", 1024, 4 * 10**6, changes)


def test_one_measured_run_predicts_the_same_job_on_more_gpus():
    """GPT-3 175B in FP8 with the constants of the 512-GPU run alone: 8 microbatches instead of 128 cost a bubble and more."""
    gpt3 = overrides.load(str(ROOT / "experiments/configs/gpt3_175b.py"))
    given = [("mesh.tensor", "4"), ("mesh.pipe", "8"), ("pipeline.chunks", "12"), ("pipeline.remat", "none")]
    other = dict(framework="mlperf-eos", precision="fp8", microbatch_rows=1)
    steps = {}
    for gpus, rows in ((512, 2048), (1536, 3072), (10752, 2688)):
        document, _, code = plan.plan(overrides.apply(gpt3, given), "dgx-h100", gpus, rows * 2048, given, **other)
        best = document["best"]
        assert (
            code == 0 and best["microbatches"] == rows // (gpus // 32) and best["low_s"] < best["step_time_s"] < best["high_s"]
        )
        steps[gpus] = best["step_time_s"]
    assert steps[512] == pytest.approx(11.0539, rel=0.03)  # the row that was fitted
    assert 1 < steps[10752] / (11.0539 * 8 / 128) < 1.6
    with pytest.raises(UserError, match="1000 GPUs"):
        plan.plan(overrides.apply(gpt3, given), "dgx-h100", 1000, 2048 * 2048, given, **other)
    with pytest.raises(UserError, match="microbatch_rows"):
        plan.plan(gpt3, "dgx-h100", 512, 2048 * 2048, **other | dict(microbatch_rows=-1))


def test_nothing_fits():
    result = main("plan", f"--config={CONFIG}", "--gpus=8", "--batch_tokens=1M", "--json")
    document = json.loads(result.stdout)
    assert result.returncode == 3 and document["best"] is None and document["layouts"] == []
    assert document["nearest"]["peak_memory_gib"] > document["memory_limit_gib"]


def test_more_of_a_resource_never_costs_time():
    model, f = costs.operators(preset("llama-3-8b")), frameworks.find("convoy", "H100-80", "bf16")
    slow, fast = (dataclasses.replace(CLUSTERS["nd-h100-v5"], nic_gbs=nic) for nic in (50, 400))
    layout = Layout(tensor=2, pipe=4, data=8, rows=1, microbatches=8, chunks=2, schedule="interleaved", zero=1)
    times = [estimate(model, 8192, layout, machine, f).step_time_s for machine in (slow, fast)]
    assert times[0] > times[1]
    by_remat = [estimate(model, 8192, dataclasses.replace(layout, remat=r), fast, f) for r in ("none", "selective", "full")]
    assert sorted(by_remat, key=lambda e: e.step_time_s) == by_remat
    assert sorted(by_remat, key=lambda e: -e.peak_memory_gib) == by_remat


def test_sweep_and_page(tmp_path):
    page = tmp_path / "plan.html"
    result = main(
        "plan",
        f"--config={CONFIG}",
        "--gpus=256",
        "--batch_tokens=2M",
        "--tokens=1T",
        "--sweep=64:300",
        f"--html={page}",
        "--json",
    )
    document = json.loads(result.stdout)
    assert [point["gpus"] for point in document["sweep"]] == [64, 128, 256, 300]
    text = page.read_text()
    assert text.count("<svg") == 3 and "srcdoc" in text and "http" not in text.replace("http://www.w3.org", "")


def test_calibration(tmp_path):
    from llm.calibrate import calibrate

    document, _ = calibrate(str(tmp_path / "here.json"), seconds=0.01)
    assert document["matmul_tflops"]["bf16"] > 0 and document["copy_tbs"] > 0
    machine = plan.calibrated(CLUSTERS["nd-h100-v5"], str(tmp_path / "here.json"))
    assert machine.gpu.rate("bf16") == pytest.approx(1e12 * document["matmul_tflops"]["bf16"])
    with pytest.raises(UserError, match="no such file"):
        plan.calibrated(machine, str(tmp_path / "none.json"))
