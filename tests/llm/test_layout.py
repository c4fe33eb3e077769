"""The planner in use: devices at hand, mixtures of experts and contexts, memory of this executor."""

import dataclasses
import math
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from llm import costs, overrides, plan
from llm.commandline import dispatch
from llm.config import BatchConfig, Config, MeshConfig, PipelineConfig, TrainConfig
from llm.costs import Mixture
from llm.devices import request_devices
from llm.layout import as_config, auto_layout, own_layout
from llm.mixtures import MIXTURES, parse_mixture
from llm.step import build
from llm.workdir import load_config
from main import COMMANDS
from parallel import bubble, executor
from parallel.errors import FitError, UserError
from parallel.memory import stash_bytes
from parallel.split import split
from tests.llm.runs import SMALL

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "experiments/configs/llama3_70b.py"


def config(*changes: tuple[str, str]):
    return overrides.apply(overrides.load(str(ROOT / CONFIG)), changes)


# ------------------------------------------------------------------------------------------- the layout of the devices at hand
def devices(count: int, kind: str = "cpu", platform: str = "cpu") -> list:
    return [SimpleNamespace(platform=platform, device_kind=kind, process_index=i // 8) for i in range(count)]


@pytest.mark.smoke
def test_the_layout_of_the_devices_at_hand():
    demo = overrides.load(str(ROOT / "experiments/configs/demo.py"))
    chosen, text = auto_layout(dataclasses.replace(demo, plan="auto"), devices(8))
    assert chosen.mesh.product == 8 and chosen.plan == "" and chosen.batch == demo.batch and chosen.model == demo.model
    assert "8 CPU" in text and "data" in text and "%" in text
    assert chosen.validate(8).mesh == chosen.mesh
    given = [("mesh.pipe", "4"), ("pipeline.remat", "full")]
    kept, _ = auto_layout(overrides.apply(demo, given), devices(8), given)
    assert kept.mesh.pipe == 4 and kept.pipeline.remat == "full" and kept.mesh.product == 8
    many, text = auto_layout(config(), devices(256, "NVIDIA H200", "gpu"))
    assert many.mesh.product == 256 and many.batch.rows == config().batch.rows and "256 H200" in text


def test_what_no_layout_can_be_had_for():
    with pytest.raises(FitError, match="nearest layout needs") as error:
        auto_layout(config(), devices(8, "NVIDIA H100 80GB HBM3", "gpu"))
    assert error.value.code == 3
    with pytest.raises(UserError, match="GeForce"):
        auto_layout(config(), devices(8, "NVIDIA GeForce RTX 4090", "gpu"))
    with pytest.raises(UserError, match=r"pipeline\.group=4 is not costed"):
        plan.plan(config(("pipeline.group", "4")), "nd-h100-v5", 256, changes=[("pipeline.group", "4")])


def test_devices_are_asked_for_without_the_mesh(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    demo = overrides.load(str(ROOT / "experiments/configs/demo.py"))
    asked = dataclasses.replace(demo, plan="auto")
    assert request_devices(asked, 4) == asked and os.environ["XLA_FLAGS"].endswith("=4")  # the mesh has 8
    assert request_devices(asked) == asked and os.environ["XLA_FLAGS"].endswith("=8")


def test_a_run_keeps_its_planned_layout(tmp_path, capsys):
    """Through the command line: said, saved, kept when the run goes on, and asked for in vain."""
    small = [f"--config.{name}={value}" for name, value in (SMALL | {"train.steps": 1, "evaluate.every": 0}).items()]
    run = ["train", f"--workdir={tmp_path}/run"]
    asked = [f"--config={ROOT}/experiments/configs/demo.py", *small, "--config.train.samples_every=0", "--config.plan=auto"]
    assert dispatch(COMMANDS, [*run, *asked, "--devices=4"]) == 0
    assert "plan=auto on 4 CPU" in (said := capsys.readouterr().err), said
    chosen = load_config(tmp_path / "run")
    assert chosen.plan == "" and chosen.mesh.product == 4
    assert dispatch(COMMANDS, [*run, "--config.train.steps=2"]) == 0
    assert "plan=auto" not in capsys.readouterr().err and load_config(tmp_path / "run").mesh == chosen.mesh
    assert dispatch(COMMANDS, [*run[:1], f"--workdir={tmp_path}/no", *asked, "--devices=4", "--config.mesh.tensor=3"]) == 2
    assert "tensor 3" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- what others can do
def test_published_mixtures_have_their_parameters():
    for name, (model, mixture, billions) in MIXTURES.items():
        assert costs.operators(model, name, mixture).parameters == pytest.approx(1e9 * billions, rel=0.01), name


def test_a_mixture_is_spread_over_experts():
    """Twice the GPUs for the experts: half of their memory and gradients, more to exchange; all else stays."""
    options = dict(framework="nemo", precision="fp8", moe="qwen3-30b-a3b", microbatch_rows=1)
    found = {}
    for over in ("4", "8"):
        given = [("mesh.expert", over), ("mesh.tensor", "1"), ("mesh.pipe", "1"), ("zero", "1"), ("pipeline.remat", "full")]
        document, text, code = plan.plan(config(*given), "nd-h200-v5", 64, 2**21, given, **options)
        found[over] = document["best"]
        assert code == 0 and "experts" in text and document["parameters"] == pytest.approx(30.5e9, rel=0.01)
        assert found[over]["mesh"]["expert"] == found[over]["expert_group"] == int(over)
        assert math.prod(found[over]["mesh"].values()) == 64
    four, eight = (found[over]["memory_parts_gib"][0] for over in ("4", "8"))
    routed = 48 * 128 * 3 * 2048 * 768 * 2 / 2**30  # two bytes for each of their weights
    assert four["parameters"] - eight["parameters"] == pytest.approx(routed / 8, rel=0.01)
    assert four["optimizer"] == pytest.approx(eight["optimizer"], rel=0.01)
    assert found["8"]["exposed_s"]["expert"] > found["4"]["exposed_s"]["expert"] > 0


def test_experts_are_asked_for_correctly():
    model = config().model
    assert parse_mixture("experts=64,active=6,ffn=1408,shared=2816", model) == (model, Mixture(64, 6, 1408, 2816))
    assert parse_mixture("DeepSeek-V3", model)[1].experts == 256
    wrong = {"experts=64": "active, ffn", "experts=4,active=6,ffn=8": "at most", "expert=4": "expert=4", "gpt-5": "deepseek-v3"}
    for text, says in wrong.items():
        with pytest.raises(UserError, match=says):
            parse_mixture(text, model)
    with pytest.raises(UserError, match="--framework"):
        plan.plan(config(), "nd-h100-v5", 64, 2**21, moe="mixtral-8x7b")


def test_a_context_is_split_for_others_only():
    given = [("mesh.context", "4"), ("mesh.tensor", "8")]
    changed = config(*given)
    document, text, code = plan.plan(changed, "nd-h100-v5", 512, 2**22, given, framework="nemo")
    assert code == 0 and {d["mesh"]["context"] for d in document["layouts"]} == {4} and "ctx" in text
    assert all(math.prod(d["mesh"].values()) == 512 and d["exposed_s"]["context"] > 0 for d in document["layouts"])
    with pytest.raises(UserError, match="context"):
        plan.plan(changed, "nd-h100-v5", 512, 2**22, given)


# --------------------------------------------------------------------------------------------- memory of the executor's buffers
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_the_stashes_are_what_the_cut_of_a_layer_makes(remat, monkeypatch):
    """Bytes a token of each class, in the executor's own cut of a bfloat16 layer; in full, B and W are one program."""
    shape = dataclasses.replace(config().model, layers=4, width=64, heads=4, kv_heads=2, head_dim=16, ffn=224, vocab=64)
    pipeline = PipelineConfig(schedule="interleaved", chunks=2, microbatches=4, remat=remat, idle="compute")
    small = Config(shape, MeshConfig(pipe=2), pipeline, BatchConfig(4, 1024), train=TrainConfig(dtype="bfloat16"))
    found = []
    monkeypatch.setattr(executor, "split", lambda *a, **k: found.append(split(*a, **k)) or found[-1])
    program = build(small, jax.devices()[:2])
    program.traced  # noqa: B018 - traces, without compiling
    size = lambda kind: sum(math.prod(x.shape) * x.dtype.itemsize for x in getattr(found[0], kind)) / 1024
    for kind, wanted in stash_bytes(costs.operators(shape), 1, remat).items():
        assert size(kind) == pytest.approx(wanted, rel=0.02), kind


@pytest.mark.parametrize(("remat", "whole"), [("selective", False), ("full", True)])
def test_the_closed_form_has_the_slots_of_the_tables(remat, whole):
    for p, m, v in ((4, 16, 4), (8, 32, 10), (2, 8, 1)):
        table = bubble.run("interleaved", p, m, v, p * v, (1, 1, 1), machine=bubble.Machine(ticks=True, whole=whole))
        closed = bubble.quick(p, m, v, p * v, (1, 1, 1), (0, 0, 0), whole)
        assert closed.chunk == table.chunk == 1
        assert {k: n for k, n in closed.slots.items() if k in ("a", "aw", "cut")} == {
            k: n for k, n in table.slots.items() if k in ("a", "aw", "cut")
        }


@pytest.mark.parametrize(("name", "gib"), [("llama3_8b", 25.2), ("llama3_70b", 47.4), ("llama31_405b", 59.1)])
def test_memory_is_that_of_the_compiled_step(name, gib):
    """GiB that XLA's programs for H100 allocate: experiments/benchmarks/planner_memory.py compiles them."""
    preset = overrides.load(str(ROOT / f"experiments/configs/{name}.py"))
    assert as_config(preset, own_layout(preset)).validate() == preset.validate()
    guess = plan.cost(preset, "nd-h100-v5")
    assert guess.peak_memory_gib - guess.memory_parts_gib[0]["workspace"] == pytest.approx(gib, rel=0.02)
