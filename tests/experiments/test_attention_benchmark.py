"""The attention benchmark: its counts, its verdicts, how it looks for tiles, what it refuses."""

import json
import sys

import jax
import numpy as np
import pytest

from experiments.benchmarks import attention, attention_step, attention_tune
from llm.config import ModelConfig
from llm.kernels import pallas_blocks
from llm.kernels.pallas_blocks import Blocks

HEADS, DIM = (2, 1), 16


@pytest.mark.parametrize("mask", attention.MASKS)
def test_the_pairs_that_are_seen_are_counted(mask):
    assert attention.seen_pairs(mask, 24) == np.broadcast_to(attention.MASKS[mask](24).visible(24, 24), (1, 24, 24)).sum()


def test_a_cell_has_times_noise_and_the_share_of_auto():
    arrays = attention.inputs(1, 24, HEADS, DIM, "float32")
    found = attention.cell(["auto", "reference"], "packed", True, arrays, 2)
    assert {"noise", "auto_of_best", "auto", "reference"} < set(found)
    assert found["auto_of_best"] <= 1
    assert found["auto"]["ms"] > 0
    assert "auto/best" in attention.text(found)


def test_only_those_that_can_do_it_are_timed():
    names = ["auto", "reference", "pallas", "cudnn", "tokamax"]
    assert attention.able(names, "packed", 8, 16, "float32") == names[:3]


def test_the_verdict_on_parity(monkeypatch):
    found = attention.parity(["chunked"], "window", 24, HEADS, DIM, "bfloat16")
    assert found["right"] == dict(chunked=True)
    assert found["errors"]["reference"] > 0
    honest = attention.passes

    def worse(backend, *how):
        run = honest(backend, *how)
        return (lambda *a: jax.tree.map(lambda x: x * 1.1, run(*a))) if backend == "chunked" else run

    monkeypatch.setattr(attention, "passes", worse)
    assert attention.parity(["chunked"], "window", 24, HEADS, DIM, "bfloat16")["right"] == dict(chunked=False)


def test_the_climb_ends_at_the_fastest_tiles_that_fit():
    ideal, tried = Blocks(128, 32, 8, 2), []

    def seconds(some):
        tried.extend(some)
        steps = lambda b: sum(abs(np.log2(x / y)) for x, y in zip((b.q, b.k, b.warps), (ideal.q, ideal.k, ideal.warps)))
        return [float("inf") if b.q == 256 else 1 + steps(b) + abs(b.stages - ideal.stages) for b in some]

    assert attention_tune.climb(Blocks(32, 64, 4, 1), lambda b: True, seconds)[0] == ideal
    best, _, count = attention_tune.climb(Blocks(32, 64, 4, 1), lambda b: b.q <= 64, seconds)
    assert best == Blocks(64, 32, 8, 2)
    assert count >= 10


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["attention.py", *flags])
    attention.main()


def test_tiles_are_timed_and_written_into_a_table(monkeypatch, tmp_path, capsys):
    """On a CPU the interpreter stands in: the command and its file are tried, not the times."""
    table = tmp_path / "blocks.json"
    monkeypatch.setattr(attention_tune, "neighbours", lambda b: [Blocks(16, 16, 4, 1)])
    flags = ["--lengths=16", "--head_dims=16", "--heads=2,1", "--masks=causal", "--rows=1", "--repeats=1", f"--table={table}"]
    run(monkeypatch, "--tune", "--interpret", *flags)
    rows = json.loads(table.read_text())
    attention_tune.write(rows[0], table)  # in place of the first
    assert json.loads(table.read_text()) == rows
    assert rows[1:] == pallas_blocks.table()
    assert {name: rows[0][name] for name in ("gpu", "head_dim", "bits", "mask")} == dict(
        gpu="interpreted", head_dim=16, bits=32, mask="causal"
    )
    assert all(rows[0]["us"][kernel] > 0 and len(rows[0][kernel]) == 4 for kernel in attention_tune.KERNELS)
    monkeypatch.setattr(pallas_blocks, "table", lambda: rows)
    assert pallas_blocks.row_for("interpreted", "causal", 16, 32) == rows[0]
    capsys.readouterr()


def test_tiles_that_do_not_compile_are_left_out(monkeypatch):
    def broken(*args):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(attention_tune.pallas_attention, "forward", broken)
    options = attention_tune.Options(1.0)
    assert attention_tune.compiled("forward", Blocks(16, 16), options, (1.0,) * 7) is None


def test_a_step_of_a_small_model():
    found = attention_step.step(attention.medians, ModelConfig(layers=1, width=16, heads=2, vocab=64), 16, 2, 1)
    assert found["tokens_per_s"] == pytest.approx(2 * 16 / found["step_s"])
    assert found["mfu_pct"] is None, "nobody knows the peak of a CPU"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--tune"], "--tune times a GPU and there is none here"),
        (["--all"], "--all times a GPU"),
        (["--backends=chunked,flesh"], "there are auto, reference"),
        (["--masks=round"], "there are causal"),
        (["--heads=3,2"], "a multiple of the second"),
        (["--lengths=0"], "1 or more"),
        (["--dtype=int8"], "there are float32"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(monkeypatch, flags, why):
    with pytest.raises(attention.UserError, match=why):
        run(monkeypatch, *flags)
