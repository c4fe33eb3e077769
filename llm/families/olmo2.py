"""OLMo 2 (arXiv 2501.00656): norms after each branch only, and a norm of all queries and of all keys together."""

from llm.families.family import KEYS, LAYER, NAMES, Family
from llm.families.llama import LLAMA

OLMO2 = Family(
    name="olmo2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names={
        **NAMES,
        f"{LAYER}.post_attention_layernorm.weight": ("layers/attention_post_norm/scale",),
        f"{LAYER}.post_feedforward_layernorm.weight": ("layers/mlp_post_norm/scale",),
    },
    sets=dict(norm_place="post", qk_norm="whole"),
    keys={theirs: ours for theirs, ours in KEYS.items() if theirs != "head_dim"},
    defaults=LLAMA.defaults | dict(rms_norm_eps=1e-5),
    demands=dict(attention_bias=False),
)


def _model(layers, width, heads, kv_heads, ffn):
    shape = dict(layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=100352, tied=False)
    return OLMO2.model(**shape, norm_eps=1e-6, rope_theta=500000.0, max_length=4096)


PRESETS = {
    "olmo-2-1b": (_model(16, 2048, 16, 16, 8192), 1_484_916_736),
    "olmo-2-7b": (_model(32, 4096, 32, 32, 11008), 7_298_617_344),
    "olmo-2-13b": (_model(40, 5120, 40, 40, 13824), 13_716_198_400),
    "olmo-2-32b": (_model(64, 5120, 40, 8, 27648), 32_234_279_936),
}
