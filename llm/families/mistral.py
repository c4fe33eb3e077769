"""Mistral (arXiv 2310.06825): Llama with an explicit head_dim and, in the first version, a window in every layer."""

import dataclasses

from llm.families.llama import LLAMA

MISTRAL = dataclasses.replace(
    LLAMA,
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults=LLAMA.defaults | dict(num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131072),
    biases=(),
    windows="all",
    divisible=False,
)


def _model(vocab, max_length, layers=32, width=4096, head_dim=128, theta=1000000.0, window=0):
    shape = dict(layers=layers, width=width, heads=32, kv_heads=8, head_dim=head_dim, ffn=14336, vocab=vocab, tied=False)
    return MISTRAL.model(**shape, rope_theta=theta, max_length=max_length, window=window)


PRESETS = {
    "mistral-7b-v0.1": (_model(32000, 32768, theta=10000.0, window=4096), 7_241_732_096),
    "mistral-7b-v0.3": (_model(32768, 32768), 7_248_023_552),
    "mistral-nemo-12b": (_model(131072, 131072, layers=40, width=5120), 12_247_782_400),
}
