"""Gemma 2 (arXiv 2408.00118): soft-caps, a window in every other layer, norms around each branch with scale 1 + w."""

from llm.families.family import ACTIVATIONS, KEYS, LAYER, NAMES, Family

NORMS = {
    f"{LAYER}.input_layernorm.weight": ("layers/attention_norm/scale",),
    f"{LAYER}.post_attention_layernorm.weight": ("layers/attention_post_norm/scale",),
    f"{LAYER}.pre_feedforward_layernorm.weight": ("layers/mlp_norm/scale",),
    f"{LAYER}.post_feedforward_layernorm.weight": ("layers/mlp_post_norm/scale",),
}

GEMMA2 = Family(
    name="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names={**NAMES, **NORMS},
    sets=dict(norm_place="both", norm_offset=1.0, scaled_embedding=True),
    keys=KEYS
    | dict(
        query_pre_attn_scalar="query_scalar",
        attn_logit_softcapping="attention_softcap",
        final_logit_softcapping="logit_softcap",
    ),
    defaults=dict(
        head_dim=256,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        max_position_embeddings=8192,
        sliding_window=4096,
        tie_word_embeddings=True,
    ),
    demands=dict(attention_bias=False, use_bidirectional_attention=False),
    activation=("hidden_activation", {"gelu_pytorch_tanh": "geglu", **ACTIVATIONS}),
    windows="listed",
    legacy_windows=lambda config, layer: layer % 2 == 0,
    divisible=True,
)


def _model(layers, width, heads, kv_heads, head_dim, ffn, query_scalar):
    shape = dict(layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=256000)
    caps = dict(query_scalar=query_scalar, attention_softcap=50.0, logit_softcap=30.0)
    return GEMMA2.model(**shape, **caps, mlp="geglu", norm_eps=1e-6, max_length=8192, window=4096, window_pattern=(1, 0))


PRESETS = {
    "gemma-2-2b": (_model(26, 2304, 8, 4, 256, 9216, 256.0), 2_614_341_888),
    "gemma-2-9b": (_model(42, 3584, 16, 8, 256, 14336, 256.0), 9_241_705_984),
    "gemma-2-27b": (_model(46, 4608, 32, 16, 128, 36864, 144.0), 27_227_128_320),
}
