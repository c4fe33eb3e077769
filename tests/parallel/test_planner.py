"""The planner: its parts against numbers known by hand, and what it picks."""

import dataclasses
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from llm import costs, overrides, plan
from llm.compile import TARGETS
from llm.families import preset
from llm.layout import as_config, possible
from parallel import bubble, communication, deviceless, frameworks, layouts, reliability
from parallel.cluster import CLUSTERS, GPUS, find_cluster, find_gpu
from parallel.errors import UserError
from parallel.operator_time import matmul
from parallel.planner import Layout, estimate
from tests.jobs import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "experiments/configs/llama3_70b.py"


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
