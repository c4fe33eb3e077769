"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases in query, key and value."""

import dataclasses

from llm.families.llama import LLAMA

QWEN2 = dataclasses.replace(
    LLAMA,
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    sets=dict(qkv_bias=True),
    keys={theirs: ours for theirs, ours in LLAMA.keys.items() if theirs != "head_dim"},
    defaults=LLAMA.defaults | dict(sliding_window=4096, max_window_layers=28, max_position_embeddings=32768),
    biases=(),
    windows="switched",
    legacy_windows=lambda config, layer: layer >= config["max_window_layers"],
)


def _model(layers, width, heads, kv_heads, ffn, vocab=151936, tied=False, max_length=32768):
    shape = dict(layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, tied=tied)
    return QWEN2.model(**shape, norm_eps=1e-6, rope_theta=1000000.0, max_length=max_length)


PRESETS = {
    "qwen2.5-0.5b": (_model(24, 896, 14, 2, 4864, tied=True), 494_032_768),
    "qwen2.5-1.5b": (_model(28, 1536, 12, 2, 8960, tied=True), 1_543_714_304),
    "qwen2.5-3b": (_model(36, 2048, 16, 2, 11008, tied=True), 3_085_938_688),
    "qwen2.5-7b": (_model(28, 3584, 28, 4, 18944, vocab=152064, max_length=131072), 7_615_616_512),
    "qwen2.5-14b": (_model(48, 5120, 40, 8, 13824, vocab=152064, max_length=131072), 14_770_033_664),
    "qwen2.5-32b": (_model(64, 5120, 40, 8, 27648, vocab=152064, max_length=131072), 32_763_876_352),
    "qwen2.5-72b": (_model(80, 8192, 64, 8, 29568, vocab=152064, max_length=131072), 72_706_203_648),
}
