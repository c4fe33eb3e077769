"""SmolLM2 (arXiv 2502.02737): Llama's architecture in small sizes, with tied embeddings."""

from llm.families.llama import LLAMA


def _model(layers, width, heads, kv_heads, ffn, theta=100000.0):
    shape = dict(layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=49152, tied=True)
    return LLAMA.model(**shape, rope_theta=theta, max_length=8192)


PRESETS = {
    "smollm2-135m": (_model(30, 576, 9, 3, 1536), 134_515_008),
    "smollm2-360m": (_model(32, 960, 15, 5, 2560), 361_821_120),
    "smollm2-1.7b": (_model(24, 2048, 32, 32, 8192, 130000.0), 1_711_376_384),
}
