"""Every family against transformers (committed results), its presets and its config.json in both directions."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from golden import CASES, FIXTURES, golden, load, rows, to_params

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from llm.families import FAMILIES, PRESETS, family_of, fitting, preset
from llm.families.family import canonical, count_parameters
from llm.model import Transformer
from llm.rotary import frequencies, rotary
from llm.step import build
from parallel import pipeline
from parallel.errors import UserError


def gradients(case: str, family, model, found: dict[str, np.ndarray]) -> dict:
    return to_params(family, model, {n.removeprefix("grad/"): a for n, a in found.items() if n.startswith("grad/")})


def check_gradients(want: dict, got: dict) -> None:
    differences = reference.difference({"grads": want}, {"grads": got})
    assert max(differences.values()) < 1e-4, differences


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(case):
    family, model, params = load(case)
    found, transformer = golden(case), Transformer(model)
    side = dict(rows(found["tokens"]), key=np.zeros((len(found["tokens"]), 2), np.uint32))

    def both(params):
        return reference.loss(transformer, params, side), reference.forward(transformer, params, side)

    (loss, logits), grads = jax.jit(jax.value_and_grad(both, has_aux=True))(params)
    np.testing.assert_allclose(logits, found["logits"], atol=1e-4)
    np.testing.assert_allclose(loss, found["loss"], rtol=1e-5)
    check_gradients(gradients(case, family, model, found), grads)


@pytest.mark.parametrize("case", ["gemma3", "gpt2", "olmo2"])
def test_pipelined_over_tensor_and_data_too(case):
    family, model, params = load(case)
    found = golden(case)
    program = build(
        Config(
            model=model,
            mesh=MeshConfig(data=2, pipe=2, tensor=2),
            pipeline=PipelineConfig(schedule="interleaved", chunks=2, microbatches=1),
            batch=BatchConfig(*found["tokens"].shape),
        )
    )
    state = dict(reference.place(program, params), step=np.int32(0), skipped=np.int32(0))
    model = program.model()

    def run(state, batch, table, forward_table):
        sums, grads = program.gradients(state, batch, table)
        side = program.side(batch, 0)
        logits, _ = pipeline.outputs(model, program.forward_plan, model.logits)(state["params"], {}, side, forward_table)
        return sums["loss"], grads, logits

    with jax.set_mesh(program.mesh):
        tables = (program.device_table, program.put_table(program.forward_plan))
        loss, grads, logits = jax.jit(run)(state, program.put(rows(found["tokens"])), *tables)
    np.testing.assert_allclose(logits.reshape(found["logits"].shape), found["logits"], atol=1e-4)
    np.testing.assert_allclose(loss, found["loss"], rtol=1e-5)
    check_gradients(gradients(case, family, program.config.model, found), reference.canonical(program, grads))


# ------------------------------------------------------------------------------------------- presets
def test_presets_have_the_published_number_of_parameters():
    wrong = {name: count_parameters(model) - number for name, (model, number) in PRESETS.items()}
    assert not {name: difference for name, difference in wrong.items() if difference}
    assert len({family.name for family in FAMILIES} | {"smollm2"}) == 9


def test_presets_survive_config_json():
    for name, (model, _) in PRESETS.items():
        family = fitting(model)
        assert canonical(family.read(json.loads(json.dumps(family.write(model))))) == canonical(model), name
        dataclasses.replace(Config(), model=model).validate()


def test_an_unknown_preset_names_those_there_are():
    assert preset("llama-3.2-1b").tied
    with pytest.raises(UserError, match=r"no preset gpt3: .*gpt2-xl"):
        preset("gpt3")


# ------------------------------------------------------------------------------------------- config.json
@pytest.mark.parametrize("case", CASES)
def test_config_json_keeps_its_meaning(case):
    """What we write says the same as what transformers wrote, for transformers 5 and for 4."""
    config = json.loads((FIXTURES / case / "config.json").read_text())
    family = family_of(config["model_type"])
    model = family.read(config)
    ours = family.write(model)
    assert canonical(family.read(ours)) == canonical(model)
    differs = {k: (v, config[k]) for k, v in ours.items() if config.get(k) not in (None, v) and k != "max_window_layers"}
    assert not differs
    old = {k: v for k, v in ours.items() if k != "rope_parameters"}
    assert canonical(family.read(old)) == canonical(model)


LLAMA = dict(
    model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=100
)
SCALING = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def read(**changes) -> ModelConfig:
    config = LLAMA | changes
    return family_of(config["model_type"]).read(config)


@pytest.mark.parametrize(
    "spelling",
    [
        dict(rope_theta=1e4, rope_scaling=dict(rope_type="llama3", **SCALING)),
        dict(rope_theta=1e4, rope_scaling=dict(type="llama3", **SCALING)),
        dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, **SCALING)),
        dict(rope_theta=1e4, rope_scaling=None, rope_parameters=dict(rope_type="llama3", rope_theta=1e4, **SCALING)),
    ],
)
def test_every_spelling_of_the_rope_is_read(spelling):
    model = read(**spelling)
    plain = read(rope_theta=1e4)
    np.testing.assert_allclose(
        frequencies(model) / frequencies(plain), [1, 0.772812, 0.130423, 0.125, 0.125, 0.125, 0.125, 0.125], rtol=1e-5
    )


def test_the_rope_of_llama_3_2():
    ratio = frequencies(preset("llama-3.2-1b")) / frequencies(dataclasses.replace(preset("llama-3.2-1b"), rope_scaling="none"))
    np.testing.assert_allclose(ratio, [1] * 15 + [0.605573, 0.303743, 0.103448] + [1 / 32] * 14, rtol=1e-5)


def test_old_layer_patterns():
    gemma = dict(model_type="gemma2", num_key_value_heads=2, head_dim=16, num_hidden_layers=4)
    assert read(**gemma).window_pattern == (1, 0)
    gemma |= dict(model_type="gemma3_text", num_hidden_layers=13, sliding_window=512)
    model = read(**gemma, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0))
    assert model.window_pattern == (1, 1, 1, 1, 1, 0) and model.rope_theta_window == 1e4 and model.rope_factor == 8
    qwen = dict(model_type="qwen2", num_hidden_layers=4, sliding_window=7, max_window_layers=3)
    assert read(**qwen).window == 0
    assert read(**qwen, use_sliding_window=True).window_pattern == (0, 0, 0, 1)
    assert read(model_type="mistral", sliding_window=None).window == 0


def test_head_dim_is_not_derived():
    """Width 40, 4 heads of 16."""
    model = read(model_type="qwen3", hidden_size=40, num_key_value_heads=2, head_dim=16)
    shapes = {tensor.name: tensor.shape for tensor in family_of("qwen3").tensors(model)}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (64, 40)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (40, 64)
    assert family_of("qwen3").write(model)["head_dim"] == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope type 'yarn'"),
        (dict(rope_parameters=dict(rope_type="dynamic", factor=4.0)), "rope type 'dynamic'"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "without low_freq_factor, high_freq_factor"),
        (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (dict(hidden_act="relu"), "hidden_act='relu'"),
        (dict(attention_bias=True), "in all linear layers or in none"),
        (dict(model_type="qwen3", attention_bias=True), "attention_bias=True"),
        (dict(model_type="gemma3"), "only its text part, gemma3_text"),
        (dict(model_type="mixtral"), "'mixtral' are not supported"),
        (dict(model_type="gpt2"), "n_layer"),
        (dict(model_type="qwen2", layer_types=["full_attention", "linear_attention"]), "layer_types"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, words):
    with pytest.raises(UserError) as error:
        read(**changes)
    assert words in str(error.value)


def test_a_model_that_no_family_has_is_refused():
    assert fitting(ModelConfig()).name == "llama"
    assert fitting(ModelConfig(qkv_bias=True)).name == "qwen2"
    assert fitting(ModelConfig(window=7)).name == "mistral"
    assert fitting(ModelConfig(qk_norm="whole", norm_place="post")).name == "olmo2"
    with pytest.raises(UserError, match=r"no family .* llama has no model with model\.norm"):
        fitting(ModelConfig(norm="layer"))


# ------------------------------------------------------------------------------------------- rotary positions
def test_angles_are_fp32_in_a_bf16_model():
    model = ModelConfig(head_dim=16).resolved()
    positions = np.arange(0, 32768, 97, dtype=np.int32)[None]
    x = jnp.zeros((1, positions.size, 1, 16), jnp.float32).at[..., :8].set(1)
    got = np.asarray(rotary(x, positions, frequencies(model)))[0, :, 0]
    angle = positions[0][:, None] * 10000.0 ** (-np.arange(8) / 8)
    wanted = np.concatenate([np.cos(angle), np.sin(angle)], -1)
    assert np.abs(got - wanted).max() < 5e-3
    assert np.abs(got - wanted)[positions[0] < 4096].max() < 5e-4
    rounded = np.asarray(rotary(x.astype(jnp.bfloat16), positions, frequencies(model)), np.float32)[0, :, 0]
    assert np.abs(rounded - wanted).max() < 1e-2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(window_pattern=(1, 0)), "needs a window"),
        (dict(window=4, window_pattern=(1, 2)), "of 0 and 1"),
        (dict(rope_theta_window=1e4), "set model.window"),
        (dict(rope_scaling="llama3", rope_low=4.0, rope_high=4.0), "must be below model.rope_high"),
    ],
)
def test_impossible_models_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        Config(model=ModelConfig(**changes)).validate()
    assert words in str(error.value)
