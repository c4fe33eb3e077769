"""Published mixtures of experts as the planner takes them; the trainer does not have them."""

from __future__ import annotations

import dataclasses
import re

from llm.config import ModelConfig
from llm.costs import Mixture
from parallel.errors import UserError


def _model(layers, width, heads, kv_heads, head_dim, ffn, vocab, **rest) -> ModelConfig:
    return ModelConfig(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab, tied=False, **rest
    )


MIXTURES: dict[str, tuple[ModelConfig, Mixture, float]] = {
    # name: model, experts, 10^9 parameters as published; shapes from the models' config.json
    "deepseek-v2": (_model(60, 5120, 128, 128, 128, 12288, 102400), Mixture(160, 6, 1536, 3072, 1, 1536, 512), 236),
    "deepseek-v3": (_model(61, 7168, 128, 128, 128, 18432, 129280), Mixture(256, 8, 2048, 2048, 3, 1536, 512), 671),
    "kimi-k2": (_model(61, 7168, 64, 64, 128, 18432, 163840), Mixture(384, 8, 2048, 2048, 1, 1536, 512), 1026),
    "qwen3-30b-a3b": (_model(48, 2048, 32, 4, 128, 6144, 151936, qk_norm="head"), Mixture(128, 8, 768), 30.5),
    "qwen3-235b-a22b": (_model(94, 4096, 64, 4, 128, 12288, 151936, qk_norm="head"), Mixture(128, 8, 1536), 235),
    "gpt-oss-20b": (_model(24, 2880, 64, 8, 64, 2880, 201088, bias=True), Mixture(32, 4, 2880), 20.9),
    "gpt-oss-120b": (_model(36, 2880, 64, 8, 64, 2880, 201088, bias=True), Mixture(128, 4, 2880), 117),
    "mixtral-8x7b": (_model(32, 4096, 32, 8, 128, 14336, 32000), Mixture(8, 2, 14336), 46.7),
    "mixtral-8x22b": (_model(56, 6144, 48, 8, 128, 16384, 32768), Mixture(8, 2, 16384), 141),
}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_mixture(name: str) -> tuple[ModelConfig, Mixture] | None:
    """The published mixture that a source means, in its own spelling ('DeepSeekV3 cut to 4 layers'), None when none is."""
    known = {_plain(key): (model, mixture) for key, (model, mixture, _) in MIXTURES.items()}
    return known.get(_plain(name.split(" cut ")[0]))


def parse_mixture(text: str, model: ModelConfig) -> tuple[ModelConfig, Mixture]:
    """`--moe`: the name of a published mixture, or experts=64,active=6,ffn=1408,... on the configuration's own model.

    Raises UserError naming the fields or the published models.
    """
    if "=" not in text:
        if (found := find_mixture(text)) is None:
            raise UserError(f"--moe={text}: published are {', '.join(MIXTURES)}; or give experts=64,active=6,ffn=1408")
        return found
    names = [field.name for field in dataclasses.fields(Mixture)]
    values = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in names or not number.isdigit():
            raise UserError(f"--moe={text}: {part!r} is not one of {', '.join(names)} with a whole number")
        values[name] = int(number)
    missing = [name for name in ("experts", "active", "ffn") if not values.get(name)]
    if missing:
        raise UserError(f"--moe={text}: {', '.join(missing)} must be given and above 0")
    if values["active"] > values["experts"] or values.get("dense", 0) >= model.layers:
        raise UserError(f"--moe={text}: active is at most experts, and dense below the model's {model.layers} layers")
    return model, Mixture(**values)
