"""GPT-2: learned positions, layer norms, biases, fused query-key-value; matrices stored as inputs x outputs (Conv1D)."""

from llm.families.family import Family, module

LAYER = "transformer.h.{}"


def _norm(theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    return {f"{theirs}.weight": (f"{ours}/scale",), f"{theirs}.bias": (f"{ours}/bias",)}


GPT2 = Family(
    name="gpt2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names={
        "transformer.wte.weight": ("embed/tokens",),
        "transformer.wpe.weight": ("embed/positions",),
        **_norm(f"{LAYER}.ln_1", "layers/attention_norm"),
        **module(f"{LAYER}.attn.c_attn", "layers/query", "layers/key", "layers/value"),
        **module(f"{LAYER}.attn.c_proj", "layers/out"),
        **_norm(f"{LAYER}.ln_2", "layers/mlp_norm"),
        **module(f"{LAYER}.mlp.c_fc", "layers/up"),
        **module(f"{LAYER}.mlp.c_proj", "layers/down"),
        **_norm("transformer.ln_f", "head/norm"),
        "lm_head.weight": ("head/tokens",),
    },
    sets=dict(positions="learned", norm="layer", bias=True),
    keys=dict(
        n_layer="layers",
        n_embd="width",
        n_head="heads",
        n_inner="ffn",
        vocab_size="vocab",
        n_positions="max_length",
        layer_norm_epsilon="norm_eps",
        tie_word_embeddings="tied",
    ),
    defaults=dict(
        n_inner=None,
        n_positions=1024,
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
        activation_function="gelu_new",
    ),
    demands=dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    activation=("activation_function", {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu-erf"}),
    transposed=False,
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)


def _model(layers, width, heads):
    return GPT2.model(layers=layers, width=width, heads=heads, vocab=50257, mlp="gelu", max_length=1024)


PRESETS = {
    "gpt2": (_model(12, 768, 12), 124_439_808),
    "gpt2-medium": (_model(24, 1024, 16), 354_823_168),
    "gpt2-large": (_model(36, 1280, 20), 774_030_080),
    "gpt2-xl": (_model(48, 1600, 25), 1_557_611_200),
}
