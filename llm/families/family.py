"""What a model family is: presets, its config.json and the names and layouts of its tensors, as data for both directions."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from llm.config import ModelConfig
from llm.model import Transformer
from parallel.errors import UserError
from parallel.sharding import ParamSpec

Json = dict[str, Any]
TRAINING_ONLY = dict(dropout=0.0, z_loss=0.0)
"""Fields of ModelConfig that change no output of the model, with the values that a comparison gives them."""

ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu-erf"}
"""Hugging Face's name of an activation -> a gated MLP."""

KEYS = dict(
    num_hidden_layers="layers",
    hidden_size="width",
    num_attention_heads="heads",
    num_key_value_heads="kv_heads",
    head_dim="head_dim",
    intermediate_size="ffn",
    vocab_size="vocab",
    tie_word_embeddings="tied",
    rms_norm_eps="norm_eps",
    max_position_embeddings="max_length",
)
"""Key of config.json -> field of ModelConfig, for the families that follow Llama."""


def module(theirs: str, *ours: str) -> dict[str, tuple[str, ...]]:
    """Names of a linear layer; of several of ours, theirs holds the outputs one after another."""
    return {
        f"{theirs}.weight": tuple(f"{name}/kernel" for name in ours),
        f"{theirs}.bias": tuple(f"{name}/bias" for name in ours),
    }


LAYER = "model.layers.{}"
NAMES = {
    "model.embed_tokens.weight": ("embed/tokens",),
    **module(f"{LAYER}.self_attn.q_proj", "layers/query"),
    **module(f"{LAYER}.self_attn.k_proj", "layers/key"),
    **module(f"{LAYER}.self_attn.v_proj", "layers/value"),
    f"{LAYER}.self_attn.q_norm.weight": ("layers/query_norm/scale",),
    f"{LAYER}.self_attn.k_norm.weight": ("layers/key_norm/scale",),
    **module(f"{LAYER}.self_attn.o_proj", "layers/out"),
    **module(f"{LAYER}.mlp.gate_proj", "layers/gate"),
    **module(f"{LAYER}.mlp.up_proj", "layers/up"),
    **module(f"{LAYER}.mlp.down_proj", "layers/down"),
    "model.norm.weight": ("head/norm/scale",),
    "lm_head.weight": ("head/tokens",),
}
"""Name of a Hugging Face tensor, {} for the layer -> our parameters, for the families that follow Llama; norms apart."""

PRE_NORMS = {
    f"{LAYER}.input_layernorm.weight": ("layers/attention_norm/scale",),
    f"{LAYER}.post_attention_layernorm.weight": ("layers/mlp_norm/scale",),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor and the parameters that it holds, one after another along the outputs.

    transposed: a matrix is stored [outputs, inputs]; ours are [inputs, outputs]. layer: None of those without layers."""

    name: str
    parts: tuple[str, ...]
    specs: tuple[ParamSpec, ...]
    layer: int | None
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        if not self.specs[0].inputs:
            return self.specs[0].shape if self.specs[0].kind == "embedding" else (sum(map(_outputs, self.specs)),)
        inputs = math.prod(self.specs[0].shape) // _outputs(self.specs[0])
        outputs = sum(map(_outputs, self.specs))
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def to_ours(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Our parameters, by name, of one layer if there is one."""
        if self.specs[0].kind == "embedding":
            return {self.parts[0]: array}
        array = array.T if self.specs[0].inputs and self.transposed else array
        ends = np.cumsum([_outputs(spec) for spec in self.specs])[:-1]
        return {
            name: piece.reshape(spec.shape) for name, spec, piece in zip(self.parts, self.specs, np.split(array, ends, axis=-1))
        }

    def from_ours(self, arrays: list[np.ndarray]) -> np.ndarray:
        """The inverse of `to_ours`; arrays in the order of `parts`."""
        if self.specs[0].kind == "embedding":
            return arrays[0]
        lead = (-1,) if self.specs[0].inputs else ()
        flat = [a.reshape(*lead, _outputs(spec)) for a, spec in zip(arrays, self.specs)]
        array = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
        return array.T if lead and self.transposed else array


def _outputs(spec: ParamSpec) -> int:
    return math.prod(n for d, n in enumerate(spec.shape) if d not in spec.inputs)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family; every field is read in both directions.

    sets: fields of ModelConfig that make the family. keys: config.json's keys of the others (None there is 0 here).
    defaults: what transformers takes where config.json is silent. demands: keys that must have this value, as nothing else
    is supported. biases: keys that all say whether linear layers have biases. activation: (key, their names -> mlp).
    windows: how config.json tells which layers have the window; see `_windows`. transposed: see Tensor. prefix: absent when
    the model without its head was saved. divisible: transformers wants width divisible by heads though head_dim is given.
    buffers: ends of names that are no parameters. presets: name -> model and its published number of parameters."""

    name: str
    model_type: str
    architecture: str
    names: Mapping[str, tuple[str, ...]]
    sets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: KEYS)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    demands: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    biases: tuple[str, ...] = ()
    activation: tuple[str, Mapping[str, str]] = ("hidden_act", ACTIVATIONS)
    windows: str = ""
    legacy_windows: Callable[[Json, int], bool] | None = None
    thetas: tuple[float, float] = (10000.0, 0.0)
    transposed: bool = True
    prefix: str = "model."
    divisible: bool = False
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
    presets: Mapping[str, tuple[ModelConfig, int]] = dataclasses.field(default_factory=dict)

    def model(self, **fields: Any) -> ModelConfig:
        """A model of this family."""
        return ModelConfig(**{**self.sets, **fields}).resolved()

    # ------------------------------------------------------------------------------------------- config.json
    def read(self, config: Json) -> ModelConfig:
        """The model that a config.json describes. Raises UserError naming what is missing or not supported."""
        v = {key: value for key, value in {**self.defaults, **config}.items() if value is not None}
        missing = [key for key in self.keys if key not in v and key not in self.defaults]
        if missing:
            raise UserError(f"config.json of a {self.model_type} model must have {', '.join(missing)}")
        for key, value in self.demands.items():
            if v.get(key, value) != value:
                raise UserError(f"config.json has {key}={v[key]!r}: {self.name} is supported with {value!r} only")
        fields = {**self.sets, **{ours: v.get(theirs) or 0 for theirs, ours in self.keys.items()}}
        fields["tied"] = bool(fields["tied"])
        biases = {key: bool(v.get(key, False)) for key in self.biases}
        if len(set(biases.values())) > 1:
            raise UserError(f"config.json has {biases}: biases are supported in all linear layers or in none")
        if self.biases:
            fields["bias"] = any(biases.values())
        key, known = self.activation
        if v.get(key) not in known:
            raise UserError(f"config.json has {key}={v.get(key)!r}: supported are {', '.join(known)}")
        fields["mlp"] = known[v[key]]
        if self.windows:
            fields |= self._read_windows(v)
        if self.sets.get("positions") != "learned":
            fields |= self._read_rope(v, bool(fields.get("window")))
        floats = {f.name for f in dataclasses.fields(ModelConfig) if f.type is float}
        return ModelConfig(**{name: float(x) if name in floats else x for name, x in fields.items()}).resolved()

    def write(self, model: ModelConfig) -> Json:
        """The config.json of a model. Raises UserError when the family has no such model."""
        model = canonical(model)
        if self.divisible and model.width % model.heads:
            raise UserError(f"{self.name} needs model.width={model.width} divisible by model.heads={model.heads}")
        config: Json = {"architectures": [self.architecture], "model_type": self.model_type}
        for theirs, ours in self.keys.items():
            value = getattr(model, ours)
            config[theirs] = int(value) if ours == "query_scalar" and value == int(value) else value
            if value == 0 and ours.endswith("softcap"):
                config[theirs] = None
        config |= self.demands | dict.fromkeys(self.biases, model.bias)
        key, known = self.activation
        config[key] = next((theirs for theirs, mlp in known.items() if mlp == model.mlp), None)
        if self.windows:
            config |= self._write_windows(model)
        if model.positions == "rotary":
            config |= self._write_rope(model)
        try:
            again = canonical(self.read(config))
        except UserError:
            again = None
        if again != model:
            differs = [f.name for f in dataclasses.fields(model) if again and getattr(again, f.name) != getattr(model, f.name)]
            raise UserError(f"{self.name} has no model with model.{', model.'.join(differs or ['mlp'])} as it is here")
        return config

    def _read_windows(self, v: Json) -> Json:
        layers, window = v["num_hidden_layers"], v.get("sliding_window") or 0
        if self.windows == "switched" and not v.get("use_sliding_window", False):
            window = 0
        if "layer_types" in v:
            unknown = set(v["layer_types"]) - {"full_attention", "sliding_attention"}
            if unknown or len(v["layer_types"]) != layers:
                raise UserError(f"config.json has layer_types={v['layer_types']} for {layers} layers: one of full_attention, "
                                "sliding_attention is needed for each")  # fmt: skip
            types = [kind == "sliding_attention" for kind in v["layer_types"]]
        else:
            types = [self.legacy_windows is None or self.legacy_windows(v, i) for i in range(layers)]
        return _pattern(types, window)

    def _write_windows(self, model: ModelConfig) -> Json:
        config: Json = {"sliding_window": model.window or None}
        if self.windows == "all":
            return config
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in model.windowed]
        if self.windows == "switched":
            first = next((i for i, windowed in enumerate(model.windowed) if windowed), model.layers)
            config |= {"use_sliding_window": bool(model.window), "max_window_layers": first}
        return config

    def _read_rope(self, v: Json, windowed: bool) -> Json:
        theta, local_theta = self.thetas
        given = v.get("rope_scaling") or v.get("rope_parameters") or {}
        local = {}
        if "full_attention" in (v.get("rope_parameters") or {}):
            given, local = v["rope_parameters"]["full_attention"], v["rope_parameters"].get("sliding_attention") or {}
        fields = {"rope_theta": given.get("rope_theta", v.get("rope_theta", theta)), **_read_scaling(given, v)}
        if windowed and (local or local_theta):
            if _rope_type(local) != "default":
                raise UserError(
                    f"config.json has rope type {_rope_type(local)!r} in layers with a window: only default is supported"
                )
            fields["rope_theta_window"] = local.get("rope_theta", v.get("rope_local_base_freq", local_theta))
        return fields

    def _write_rope(self, model: ModelConfig) -> Json:
        scaling: Json = {"rope_type": "default"}
        if model.rope_scaling != "none":
            scaling = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
        if model.rope_scaling == "llama3":
            scaling |= {"low_freq_factor": model.rope_low, "high_freq_factor": model.rope_high}
            scaling["original_max_position_embeddings"] = model.rope_original
        whole = {"rope_theta": model.rope_theta, **scaling}
        config: Json = {"rope_theta": model.rope_theta, "rope_parameters": whole}  # of transformers 4, and of 5
        config["rope_scaling"] = None if model.rope_scaling == "none" else scaling
        if self.thetas[1]:
            local = model.rope_theta_window or model.rope_theta
            config["rope_local_base_freq"] = local
            config["rope_parameters"] = {
                "full_attention": whole,
                "sliding_attention": {"rope_theta": local, "rope_type": "default"},
            }
        return config

    # ------------------------------------------------------------------------------------------- tensors
    def tensors(self, model: ModelConfig) -> Iterator[Tensor]:
        """Every tensor of a model, in the order of `names`."""
        specs = parameter_specs(model)
        for pattern, parts in self.names.items():
            if not all(part in specs for part in parts):
                continue
            own = tuple(specs.pop(part) for part in parts)
            for layer in range(model.layers) if own[0].stacked else (None,):
                yield Tensor(pattern.format(layer), parts, own, layer, self.transposed)
        if specs:
            raise UserError(f"{self.name} has no names for {', '.join(specs)}")


def parameter_specs(model: ModelConfig) -> dict[str, ParamSpec]:
    """Every parameter of a model by its name on disk, without "params/"."""
    flat, _ = jax.tree_util.tree_flatten_with_path(Transformer(model.resolved()).specs())
    return {jax.tree_util.keystr(path, simple=True, separator="/"): spec for path, spec in flat}


def count_parameters(model: ModelConfig) -> int:
    """Number of parameters, nothing allocated."""
    return sum(math.prod(s.shape) * (model.layers if s.stacked else 1) for s in parameter_specs(model).values())


def canonical(model: ModelConfig) -> ModelConfig:
    """The same model, written in one way only: equal for two configurations that compute the same."""
    changes = {**TRAINING_ONLY, **_pattern(list(model.windowed), model.window)}
    if model.rope_scaling == "none" or model.positions == "learned":
        changes |= {name: _DEFAULT[name] for name in ("rope_scaling", "rope_factor")}
    if model.rope_scaling != "llama3" or model.positions == "learned":
        changes |= {name: _DEFAULT[name] for name in ("rope_low", "rope_high", "rope_original")}
    same = model.rope_theta_window == model.rope_theta and model.rope_scaling == "none"
    if model.positions == "learned" or not changes["window"] or same:
        changes["rope_theta_window"] = 0.0
    if model.positions == "learned":
        changes["rope_theta"] = _DEFAULT["rope_theta"]
    if model.bias:
        changes["qkv_bias"] = False
    model = dataclasses.replace(model.resolved(), **changes)
    return dataclasses.replace(model, query_scalar=float(model.query_scalar or model.head_dim))


_DEFAULT = dataclasses.asdict(ModelConfig())


def _pattern(windowed: list[bool], window: int) -> Json:
    """The window and the shortest pattern that says which layers have it."""
    n = next(n for n in range(1, len(windowed) + 1) if all(w == windowed[i % n] for i, w in enumerate(windowed)))
    pattern = tuple(map(int, windowed[:n]))
    if not window or not any(pattern):
        return {"window": 0, "window_pattern": ()}
    return {"window": window, "window_pattern": () if all(pattern) else pattern}


def _rope_type(given: Json) -> str:
    return given.get("rope_type", given.get("type")) or "default"


def _read_scaling(given: Json, v: Json) -> Json:
    kind = _rope_type(given)
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"config.json asks for rope type {kind!r}: supported are default, linear and llama3")
    if given.get("partial_rotary_factor", v.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError("config.json has a partial_rotary_factor: only whole heads can be turned")
    if kind == "default":
        return {}
    wanted = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}[kind]
    if missing := [key for key in wanted if key not in given]:
        raise UserError(f"config.json has rope type {kind} without {', '.join(missing)}")
    fields = {"rope_scaling": kind, "rope_factor": given["factor"]}
    if kind == "llama3":
        original = given.get("original_max_position_embeddings", v["max_position_embeddings"])
        fields |= {"rope_low": given["low_freq_factor"], "rope_high": given["high_freq_factor"], "rope_original": original}
    return fields
