"""Llama 2, 3, 3.1 and 3.2 (arXiv 2307.09288, 2407.21783), and everything else whose model_type is llama."""

from llm.families.family import NAMES, PRE_NORMS, Family

LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    names={**NAMES, **PRE_NORMS},
    defaults=dict(
        num_key_value_heads=None,
        head_dim=None,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
    biases=("attention_bias", "mlp_bias"),
    divisible=True,
)


def _llama2(layers, width, heads, kv_heads, ffn):
    return LLAMA.model(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=32000, tied=False, max_length=4096
    )


def _llama3(layers, width, heads, ffn, factor=0.0, tied=False):
    """factor: of the stretched wavelengths (from 3.1 on)."""
    rope = dict(rope_scaling="llama3", rope_factor=factor, max_length=131072) if factor else dict(max_length=8192)
    shape = dict(layers=layers, width=width, heads=heads, kv_heads=8, ffn=ffn, vocab=128256, tied=tied)
    return LLAMA.model(**shape, **rope, rope_theta=500000.0)


PRESETS = {
    "llama-2-7b": (_llama2(32, 4096, 32, 32, 11008), 6_738_415_616),
    "llama-2-13b": (_llama2(40, 5120, 40, 40, 13824), 13_015_864_320),
    "llama-2-70b": (_llama2(80, 8192, 64, 8, 28672), 68_976_648_192),
    "llama-3-8b": (_llama3(32, 4096, 32, 14336), 8_030_261_248),
    "llama-3-70b": (_llama3(80, 8192, 64, 28672), 70_553_706_496),
    "llama-3.1-8b": (_llama3(32, 4096, 32, 14336, 8.0), 8_030_261_248),
    "llama-3.1-70b": (_llama3(80, 8192, 64, 28672, 8.0), 70_553_706_496),
    "llama-3.1-405b": (_llama3(126, 16384, 128, 53248, 8.0), 405_853_388_800),
    "llama-3.2-1b": (_llama3(16, 2048, 32, 8192, 32.0, tied=True), 1_235_814_400),
    "llama-3.2-3b": (_llama3(28, 3072, 24, 8192, 32.0, tied=True), 3_212_749_824),
}
