"""Qwen3, dense (arXiv 2505.09388): a norm of each head of queries and keys instead of biases; an explicit head_dim."""

import dataclasses

from llm.families.llama import LLAMA
from llm.families.qwen2 import QWEN2

QWEN3 = dataclasses.replace(
    QWEN2,
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    sets=dict(qk_norm="head"),
    keys=LLAMA.keys,
    defaults=QWEN2.defaults | dict(head_dim=128),
    demands=dict(attention_bias=False),
    divisible=False,
)


def _model(layers, width, heads, ffn, tied=False):
    shape = dict(layers=layers, width=width, heads=heads, kv_heads=8, head_dim=128, ffn=ffn, vocab=151936, tied=tied)
    return QWEN3.model(**shape, norm_eps=1e-6, rope_theta=1000000.0, max_length=40960)


PRESETS = {
    "qwen3-0.6b": (_model(28, 1024, 16, 3072, tied=True), 596_049_920),
    "qwen3-1.7b": (_model(28, 2048, 16, 6144, tied=True), 1_720_574_976),
    "qwen3-4b": (_model(36, 2560, 32, 9728, tied=True), 4_022_468_096),
    "qwen3-8b": (_model(36, 4096, 32, 12288), 8_190_735_360),
    "qwen3-14b": (_model(40, 5120, 40, 17408), 14_768_307_200),
    "qwen3-32b": (_model(64, 5120, 64, 25600), 32_762_123_264),
}
