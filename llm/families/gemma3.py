"""Gemma 3, text (arXiv 2503.19786): five layers with a window and a rotary base of their own to one without; no soft-caps."""

import dataclasses

from llm.families.gemma2 import GEMMA2

GEMMA3 = dataclasses.replace(
    GEMMA2,
    name="gemma3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    sets=GEMMA2.sets | dict(qk_norm="head"),
    keys={theirs: ours for theirs, ours in GEMMA2.keys.items() if theirs != "attn_logit_softcapping"},
    defaults=GEMMA2.defaults
    | dict(attn_logit_softcapping=None, final_logit_softcapping=None, max_position_embeddings=131072, sliding_window_pattern=6),
    demands=GEMMA2.demands | dict(attn_logit_softcapping=None),  # transformers reads it and does nothing with it
    legacy_windows=lambda config, layer: (layer + 1) % config["sliding_window_pattern"] != 0,
    thetas=(1000000.0, 10000.0),
)


def _model(layers, width, heads, kv_heads, ffn, head_dim=256, scalar=256.0, window=1024, vocab=262208, factor=8.0):
    """factor: of the stretched wavelengths in layers without a window; 1 when they are not."""
    scaling = dict(rope_scaling="linear", rope_factor=factor) if factor > 1 else {}
    rope = dict(rope_theta=1000000.0, rope_theta_window=10000.0, **scaling)
    shape = dict(layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab)
    return GEMMA3.model(
        **shape,
        **rope,
        mlp="geglu",
        norm_eps=1e-6,
        max_length=131072 if factor > 1 else 32768,
        window=window,
        window_pattern=(1, 1, 1, 1, 1, 0),
        query_scalar=scalar,
    )


PRESETS = {  # from 4b on, the published models have a vision tower, which is not counted
    "gemma-3-270m": (_model(18, 640, 4, 1, 2048, window=512, vocab=262144, factor=1.0), 268_098_176),
    "gemma-3-1b": (_model(26, 1152, 4, 1, 6912, window=512, vocab=262144, factor=1.0), 999_885_952),
    "gemma-3-4b": (_model(34, 2560, 8, 4, 10240), 3_880_263_168),
    "gemma-3-12b": (_model(48, 3840, 16, 8, 15360), 11_766_034_176),
    "gemma-3-27b": (_model(62, 5376, 32, 16, 21504, head_dim=128, scalar=168.0), 27_009_346_304),
}
