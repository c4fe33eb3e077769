"""The operator table of a model: parameters of published models, and what reads of a layer."""

import pytest

from llm.config import ModelConfig
from llm.costs import matmul_parameters, operators, train_flops_per_token
from llm.families import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_has_the_parameters_of_a_published_model(name):
    model, parameters = PRESETS[name]
    assert operators(model).parameters == pytest.approx(parameters, rel=1e-4)


def test_model_flops_are_those_of_the_trainer():
    model = ModelConfig(layers=8, width=16, heads=4, kv_heads=2, head_dim=4, ffn=40, vocab=96, tied=False)
    table = operators(model)
    assert table.model_flops(1, 32) == train_flops_per_token(model, 32) == 163_584
    assert table.layers * sum(m.n * m.k for m in table.matmuls) + 96 * 16 == matmul_parameters(model) == 23_040


def test_kept_activations_are_the_paper_s():
    """Korthikanti et al. 2022: 34 s b h bytes of a layer without scores, of which 24 are divided by tensor."""
    h = 512
    model = ModelConfig(width=h, heads=8, norm="layer", mlp="gelu", bias=True, dropout=0.1, positions="learned")
    split, whole = operators(model).kept
    assert 2 * (split + whole) == pytest.approx(34 * h, rel=0.07)
    assert 2 * split == pytest.approx(24 * h, rel=0.01)
