"""GGUF files (llama.cpp) seen as Hugging Face folders: tensors dequantised one by one, config.json and tokenizer rebuilt.

Needs the package `gguf`, which knows the quantisations. What llama.cpp changes on conversion is undone here: in its llama
architecture the rows of queries and keys are ordered for rotary pairs (2i, 2i + 1), and Gemma's norms hold 1 + w."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llm.config import ModelConfig
from llm.families import family_of
from llm.families.family import Json
from llm.gguf_tokenizer import tokenizer_json
from llm.rotary import frequencies
from parallel.errors import UserError

MODEL_TYPES = dict(
    llama="llama", qwen2="qwen2", qwen3="qwen3", gemma2="gemma2", gemma3="gemma3_text", olmo2="olmo2", gpt2="gpt2"
)
"""GGUF's architecture -> model_type of Hugging Face; llama.cpp knows Mistral as llama."""

NAMES = {
    "embed/tokens": "token_embd.weight",
    "embed/positions": "position_embd.weight",
    "layers/attention_norm/scale": "blk.{}.attn_norm.weight",
    "layers/attention_post_norm/scale": "blk.{}.post_attention_norm.weight",
    "layers/query/kernel": "blk.{}.attn_q.weight",
    "layers/key/kernel": "blk.{}.attn_k.weight",
    "layers/value/kernel": "blk.{}.attn_v.weight",
    "layers/query_norm/scale": "blk.{}.attn_q_norm.weight",
    "layers/key_norm/scale": "blk.{}.attn_k_norm.weight",
    "layers/out/kernel": "blk.{}.attn_output.weight",
    "layers/mlp_norm/scale": "blk.{}.ffn_norm.weight",
    "layers/mlp_post_norm/scale": "blk.{}.post_ffw_norm.weight",
    "layers/gate/kernel": "blk.{}.ffn_gate.weight",
    "layers/up/kernel": "blk.{}.ffn_up.weight",
    "layers/down/kernel": "blk.{}.ffn_down.weight",
    "head/norm/scale": "output_norm.weight",
    "head/tokens": "output.weight",
}
NAMES |= {  # biases of norms and of all matrices
    f"{ours.rpartition('/')[0]}/bias": theirs.replace(".weight", ".bias")
    for ours, theirs in NAMES.items()
    if ours.endswith(("/scale", "/kernel"))
}
JOINED = {"layers/query/kernel": "blk.{}.attn_qkv.weight", "layers/query/bias": "blk.{}.attn_qkv.bias"}
"""Of tensors that hold queries, keys and values."""

KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Key of config.json -> GGUF's key, after the name of the architecture."""
GPT2_KEYS = {
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}

ROPE_FACTORS = "rope_freqs.weight"  # by what each pair's frequency is divided (Llama 3.1 and later)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file. pairs: heads whose rows are to be put back; minus: subtracted (1 of Gemma's norms); turned:
    Hugging Face has it transposed."""

    path: Path
    inner: Any  # gguf.ReaderTensor
    pairs: int = 0
    minus: float = 0.0
    turned: bool = False

    @property
    def dtype(self) -> str:
        return self.inner.tensor_type.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._own[::-1] if self.turned else self._own

    @property
    def _own(self) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self.inner.shape))

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start to stop of the tensor, in fp32, as Hugging Face has it; of a turned one always the whole."""
        from gguf import quants

        rows = self._own[0] if self._own[1:] else 1
        size = self.inner.n_bytes // rows
        number = len(range(*slice(start, stop).indices(rows)))
        # read, not mapped: pages of a map would count as resident memory
        raw = np.fromfile(self.path, np.uint8, number * size, offset=self.inner.data_offset + start * size)
        if raw.size < number * size:
            raise UserError(f"{self.path} is cut short: tensor {self.inner.name} is not whole")
        try:
            array = quants.dequantize(raw.reshape(number, size), self.inner.tensor_type).reshape(-1, *self._own[1:])
        except NotImplementedError:
            raise UserError(f"{self.path}: tensor {self.inner.name} is of type {self.dtype}, which gguf cannot read") from None
        if self.pairs:
            half = self.shape[0] // self.pairs // 2
            array = array.reshape(self.pairs, half, 2, *self.shape[1:]).swapaxes(1, 2).reshape(self.shape)
        array = array - np.float32(self.minus) if self.minus else array
        return array.T if self.turned else array


class GgufFile:
    """The source of an import. Raises UserError on an architecture or a tokenizer that is not supported."""

    def __init__(self, path: Path):
        try:
            from gguf import GGUFReader
        except ImportError:
            raise UserError("reading GGUF files needs the package gguf: pip install gguf") from None
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise UserError(f"{path} is not a GGUF file that can be read: {error}") from None
        self.path, self.fields = path, reader.fields
        self.kind = self._get("general.architecture")
        if self.kind not in MODEL_TYPES:
            raise UserError(f"{path} is of architecture {self.kind!r}: supported are {', '.join(MODEL_TYPES)}")
        given = {tensor.name: GgufTensor(path, tensor) for tensor in reader.tensors}
        self.config = self._config(given)
        self.tensors = self._tensors(given)
        self.files = self._files()

    def _get(self, key: str, otherwise: Any = None) -> Any:
        if key not in self.fields:
            return otherwise
        value = self.fields[key].contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-5, not its fp32 neighbour

    def _own(self, key: str) -> Any:
        return self._get(f"{self.kind}.{key}")

    def _config(self, given: dict[str, GgufTensor]) -> Json:
        keys = GPT2_KEYS if self.kind == "gpt2" else KEYS
        config: Json = {theirs: self._own(key) for theirs, key in keys.items()}
        config = {key: value for key, value in config.items() if value is not None}
        config |= {"model_type": MODEL_TYPES[self.kind], "tie_word_embeddings": NAMES["head/tokens"] not in given}
        config["tie_word_embeddings"] |= self.kind == "gpt2"  # old files have the embedding twice
        if NAMES["embed/tokens"] not in given:
            raise UserError(f"{self.path} has no tensor {NAMES['embed/tokens']}")
        config["vocab_size"] = given[NAMES["embed/tokens"]].shape[0]
        for name in ("bos", "eos", "pad"):
            config[f"{name}_token_id"] = self._get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")
        kind = self._own("rope.scaling.type")
        if kind not in (None, "none"):
            config["rope_scaling"] = {"rope_type": kind, "factor": self._own("rope.scaling.factor") or 1.0}
        if self.kind.startswith("gemma"):  # as llama.cpp, which knows the 27b models by their depth
            by_width = config["num_hidden_layers"] in (46, 62)
            size = config["hidden_size"] // config["num_attention_heads"] if by_width else config.get("head_dim", 256)
            config["query_pre_attn_scalar"] = size
        elif self.kind in ("qwen2", "qwen3"):
            config["use_sliding_window"] = False
        if ROPE_FACTORS in given:
            config["rope_scaling"] = self._llama3(config, given[ROPE_FACTORS].read())
        return config

    def _llama3(self, config: Json, factors_K: np.ndarray) -> Json:
        """The stretch whose factors these are; only the published one is known."""
        scaling = dict(rope_type="llama3", factor=round(float(factors_K.max()), 4), low_freq_factor=1.0, high_freq_factor=4.0)
        scaling["original_max_position_embeddings"] = 8192
        read = lambda **changes: frequencies(family_of("llama").read({**config, **changes}))
        wanted_K = read() / read(rope_scaling=scaling)
        if wanted_K.shape != factors_K.shape or not np.allclose(wanted_K, factors_K, rtol=1e-3):
            raise UserError(f"{self.path}: {ROPE_FACTORS} is not the stretch of Llama 3.1, and no other is supported")
        return scaling

    def _tensors(self, given: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
        """By Hugging Face's names; what has none keeps its own and is refused as unknown."""
        family = family_of(self.config["model_type"])
        model: ModelConfig = family.read(self.config)
        gemma = self.kind.startswith("gemma")
        found, left = {}, {name: tensor for name, tensor in given.items() if name != ROPE_FACTORS}
        for pattern, parts in family.names.items():
            theirs, part = (JOINED if len(parts) > 1 else NAMES).get(parts[0]), parts[0].split("/")
            for layer in range(model.layers) if theirs and part[0] == "layers" else (0,) if theirs else ():
                if tensor := left.pop(theirs.format(layer), None):
                    heads = dict(query=model.heads, key=model.kv_heads).get(part[1], 0) if self.kind == "llama" else 0
                    minus = 1.0 if gemma and part[-1] == "scale" else 0.0
                    turned = self.kind == "gpt2" and part[-1] == "kernel"
                    found[pattern.format(layer)] = GgufTensor(self.path, tensor.inner, heads, minus, turned)
        return found | left

    def _files(self) -> dict[str, str]:
        """config.json and, where the file has a tokenizer, tokenizer.json and what stands beside it."""
        special = {key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        dump = lambda value: json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        files = {"config.json": dump(self.config), "generation_config.json": dump(special)}
        if self._get("tokenizer.ggml.model") is None:
            return files
        tokenizer = tokenizer_json(self._get, self.config["bos_token_id"], str(self.path))
        tokens = self._get("tokenizer.ggml.tokens")
        about = {key.removesuffix("_id"): tokens[i] for key, i in special.items() if i is not None}
        about |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        about |= {"model_max_length": self._own("context_length")}
        if template := self._get("tokenizer.chat_template"):
            about["chat_template"] = template
        return files | {"tokenizer.json": dump(tokenizer), "tokenizer_config.json": dump(about)}
