"""Model families: presets, and the two directions between Hugging Face's conventions and ours. One file a family."""

from llm.config import ModelConfig
from llm.families import gemma2, gemma3, gpt2, llama, mistral, olmo2, qwen2, qwen3, smollm2
from llm.families.family import Family
from parallel.errors import UserError

FAMILIES: tuple[Family, ...] = (
    llama.LLAMA,
    gpt2.GPT2,
    mistral.MISTRAL,
    qwen2.QWEN2,
    qwen3.QWEN3,
    gemma2.GEMMA2,
    gemma3.GEMMA3,
    olmo2.OLMO2,
)
PRESETS: dict[str, tuple[ModelConfig, int]] = {
    name: preset
    for family in (gpt2, llama, smollm2, mistral, qwen2, qwen3, gemma2, gemma3, olmo2)
    for name, preset in family.PRESETS.items()
}
"""Name of a published model -> the model and its number of parameters."""


def preset(name: str) -> ModelConfig:
    """A published model by name. Raises UserError naming those there are."""
    if name not in PRESETS:
        raise UserError(f"there is no preset {name}: there are {', '.join(PRESETS)}")
    return PRESETS[name][0]


def family_of(model_type: str) -> Family:
    """The family whose config.json has this model_type. Raises UserError naming those there are."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    hint = ": only its text part, gemma3_text, is" if model_type == "gemma3" else f": there are {known}"
    raise UserError(f"models of type {model_type!r} are not supported{hint}")


def fitting(model: ModelConfig) -> Family:
    """The first family that has such a model. Raises UserError when none has."""
    reasons = []
    for family in FAMILIES:
        try:
            family.write(model)
            return family
        except UserError as error:
            reasons.append(str(error))
    raise UserError("no family that Hugging Face knows has this model: " + "; ".join(reasons))
