"""The cases that transformers computed (tests/fixtures/make_golden.py), as our models and parameters; small models on disk."""

import json
from pathlib import Path

import numpy as np

from llm import safetensor_files
from llm.config import ModelConfig
from llm.families import family_of
from llm.families.family import Family
from llm.huggingface import WEIGHTS, open_source

FIXTURES = Path(__file__).resolve().parent / "fixtures"
CASES = sorted(path.parent.name for path in FIXTURES.glob("*/golden.npz"))


def golden(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / case / "golden.npz"))


def load(case: str) -> tuple[Family, ModelConfig, dict]:
    """(family, model, canonical parameters: layers stacked in order)."""
    source = open_source(FIXTURES / case)
    family = family_of(source.config["model_type"])
    model = family.read(source.config)
    return family, model, to_params(family, model, {name: entry.read() for name, entry in source.tensors.items()})


def to_params(family: Family, model: ModelConfig, tensors: dict[str, np.ndarray]) -> dict:
    """Hugging Face's tensors, or their gradients, as a tree like the parameters."""
    flat: dict[str, list] = {}
    for tensor in family.tensors(model):
        for name, value in tensor.to_ours(tensors[tensor.name]).items():
            flat.setdefault(name, []).append(value)
    tree: dict = {}
    for name, values in flat.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = np.stack(values) if path[0] == "layers" else values[0]
    return tree


def rows(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """A batch of whole rows in which every next token counts."""
    number, length = tokens.shape
    weights = np.ones((number, length), np.float32)
    weights[:, -1] = 0
    return dict(
        tokens=tokens,
        targets=np.roll(tokens, -1, 1),
        segments=np.zeros((number, length), np.int32),
        positions=np.tile(np.arange(length, dtype=np.int32), (number, 1)),
        weights=weights,
        example=np.arange(number, dtype=np.int32),
    )


LLAMA = dict(
    model_type="llama",
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    vocab_size=101,
    tie_word_embeddings=False,
    max_position_embeddings=64,
)


def write_folder(folder: Path, tensors: dict[str, np.ndarray], config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    dtype = next(iter(tensors.values())).dtype
    safetensor_files.write(folder / WEIGHTS, {n: a.shape for n, a in tensors.items()}, dtype, lambda name: [tensors[name]])
    return folder


def random_tensors(config: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    family, random = family_of(config["model_type"]), np.random.default_rng(0)
    shapes = {tensor.name: tensor.shape for tensor in family.tensors(family.read(config))}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def llama(folder: Path, dtype=np.float32, **changes) -> Path:
    config = LLAMA | changes
    return write_folder(folder, random_tensors(config, dtype), config)
