"""Configuration: what is derived, what is refused, and how dotted overrides are read."""

import dataclasses
import json

import pytest

from llm import costs, overrides
from llm.config import (
    BatchConfig,
    Config,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
)
from llm.fields import from_dict, to_dict
from parallel.axes import AXES
from parallel.cluster import peak_flops
from parallel.errors import UserError

pytestmark = pytest.mark.smoke


def change(**values) -> Config:
    return overrides.apply(Config(), [(name.replace("__", "."), str(value)) for name, value in values.items()])


def test_the_mesh_has_the_axes_of_the_executor():
    assert tuple(MeshConfig().sizes()) == AXES


def test_resolved_fills_what_is_derived():
    config = Config(model=ModelConfig(width=96, heads=6), mesh=MeshConfig(pipe=2, data=-1)).resolved(8)
    assert (config.model.kv_heads, config.model.head_dim, config.model.ffn) == (6, 16, 256)
    assert config.mesh.data == 4 and config.pipeline.microbatches == 4
    assert config.resolved(8) == config


@pytest.mark.parametrize(
    ("rows", "pipe", "data", "microbatches"), [(16, 4, 2, 8), (16, 4, 1, 8), (8, 4, 2, 4), (6, 4, 2, 3), (16, 1, 2, 1)]
)
def test_default_microbatches_divide_the_rows(rows, pipe, data, microbatches):
    config = Config(batch=BatchConfig(rows=rows), mesh=MeshConfig(pipe=pipe, data=data)).validate()
    assert config.pipeline.microbatches == microbatches


def test_a_configuration_survives_json():
    config = Config(pipeline=PipelineConfig(layers_per_chunk=(1, 3)), model=ModelConfig(dropout=0.1))
    assert from_dict(json.loads(json.dumps(to_dict(config))), Config) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(mesh__tensor=3), ["heads=4", "tensor=3", "1, 2, 4"]),
        (dict(batch__rows=6, mesh__data=4), ["rows=6", "4 or 8"]),
        (dict(batch__rows=12, mesh__data=2, pipeline__microbatches=4), ["2", "4 = 8", "8 or 16"]),
        (dict(model__width=100, model__heads=8), ["width=100", "1, 2, 4, 5, 10"]),
        (dict(model__kv_heads=3), ["kv_heads=3", "1, 2, 4"]),
        (dict(model__head_dim=3), ["odd"]),
        (dict(model__positions="learned", model__max_length=64), ["length=128", "64"]),
        (dict(mesh__context=2), ["context", "1"]),
        (dict(mesh__data=-1, mesh__pipe=-1), ["data", "pipe", "-1"]),
        (dict(mesh__data=0), ["mesh.data=0"]),
        (dict(pipeline__layers_per_chunk="1,2"), ["adds up to 3", "layers=4"]),
        (dict(mesh__pipe=4, pipeline__layers_per_chunk="2,2"), ["2 chunks", "multiple of mesh.pipe=4"]),
        (dict(pipeline__layers_per_chunk="5,-1"), ["5, -1", "at least 0 layers"]),
        (dict(pipeline__schedule="ZB-V"), ["did you mean 'zb-v'"]),
        (dict(pipeline__schedule="dualpipe"), ["dualpipe", "not executed", "interleaved"]),
        (dict(pipeline__schedule="no.csv"), ["no.csv", "No such file"]),
        (dict(pipeline__schedule="zb-v", pipeline__chunks=3), ["2 chunks a rank, not 3"]),
        (dict(pipeline__schedule="1f1b", pipeline__group=4), ["no groups"]),
        (dict(mesh__pipe=4, pipeline__schedule="gis", pipeline__group=2), ["group of 2", "4 stages"]),
        (dict(mesh__pipe=4, pipeline__schedule="adaptive-v", pipeline__memory=1), ["4 stages need 2"]),
        (dict(pipeline__schedule="auto", pipeline__memory=0.5), ["memory", "at least 1"]),
        (dict(model__layers=0), ["model.layers=0", "least is 1"]),
        (dict(model__dropout=1), ["dropout=1.0", "below 1"]),
        (dict(profile="7"), ["START:STOP"]),
        (dict(profile="90:101"), ["90:101", "train.steps=100"]),
        (dict(train__samples_every=5, train__sample_prompt=""), ["sample_prompt"]),
    ],
)
def test_refused_with_what_would_fit(changes, words):
    with pytest.raises(UserError) as error:
        change(**changes).validate()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_number_of_devices_must_be_the_product():
    with pytest.raises(UserError, match="needs 8 devices and there are 4"):
        change(mesh__pipe=4, mesh__data=2).validate(4)
    with pytest.raises(UserError, match="does not divide 6"):
        change(mesh__pipe=4, mesh__data=-1).validate(6)
    with pytest.raises(UserError, match="--devices=N with N a multiple of 4"):
        change(mesh__pipe=4, mesh__data=-1).validate()


def test_wrong_types_in_a_file_are_refused():
    with pytest.raises(UserError, match=r"model\.layers=1\.5 must be an integer"):
        dataclasses.replace(Config(), model=ModelConfig(layers=1.5)).validate()
    with pytest.raises(UserError, match=r"optimizer\.name=adam is not one of adamw, muon, sgd"):
        from_dict({"optimizer": {"name": "adam"}}, Config).validate()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optimizer.lr", "1e-4", 1e-4),
        ("optimizer.lr", "1.0e-4", 1e-4),
        ("optimizer.lr", "0.0001", 1e-4),
        ("optimizer.lr", "1", 1.0),
        ("train.steps", "1e3", 1000),
        ("mesh.data", "-1", -1),
        ("model.tied", "false", False),
        ("model.tied", "True", True),
        ("pipeline.layers_per_chunk", "(1,2)", (1, 2)),
        ("pipeline.layers_per_chunk", "1, 2", (1, 2)),
        ("pipeline.layers_per_chunk", "", ()),
        ("data.paths", "a b.txt,'c'", ("a b.txt", "c")),
        ("data.held_out", "0.05", "0.05"),
    ],
)
def test_values_take_the_type_of_their_field(name, text, value):
    parsed = overrides.leaves(overrides.apply(Config(), [(name, text)]))[name][1]
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("optimiser.lr", "1", "optimizer.lr"),
        ("lr", "1", "optimizer.lr"),
        ("model.layres", "1", "model.layers"),
        ("mesh.pip", "1", "mesh.pipe"),
        ("optimizer.name", "adam", "adamw"),
        ("pipeline.idle", "compue", "compute"),
        ("train.steps", "1.5", "expected an integer"),
        ("optimizer.lr", "fast", "expected a number"),
        ("optimizer.lr", "nan", "expected a number"),
        ("model.tied", "no", "expected true or false"),
        ("pipeline.layers_per_chunk", "1,x", "expected an integer"),
        ("model", "1", "a group of options"),
    ],
)
def test_a_wrong_override_says_what_is_right(name, text, words):
    with pytest.raises(UserError) as error:
        overrides.apply(Config(), [(name, text)])
    assert words in str(error.value) and name in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("from llm.config import *\nget_config = lambda: Config(model=ModelConfig(layres=4))", "did you mean layers?"),
        ("x = 1\nx = 1 / 0", "line 2: ZeroDivisionError"),
        ("def get_config(:", "line 1: SyntaxError"),
        ("get_config = lambda: 3", "must have get_config()"),
        ("", "must have get_config()"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, source, words):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(UserError) as error:
        overrides.load(str(path))
    assert words in str(error.value)
    with pytest.raises(UserError, match=r"did you mean mine\.py\?"):
        overrides.load(str(tmp_path / "mien.py"))


def test_flops_count_the_head_once_and_causal_attention():
    model = ModelConfig(layers=8, width=16, heads=4, kv_heads=2, ffn=40, vocab=96, tied=False)
    assert costs.matmul_parameters(model) == 23_040
    assert costs.train_flops_per_token(model, 32) == 163_584


def test_peaks_are_dense_and_absent_on_a_cpu():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA GB200", "bfloat16") == 2500e12
    assert peak_flops("cpu", "bfloat16") is None
