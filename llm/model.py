"""The decoder-only transformer: embed, blocks, head. The shapes of many families by configuration (llm/families).

Letters: B rows, S positions, D width, H heads, G heads of keys and values, K size of a head, F hidden size of the MLP,
V vocabulary (this rank's slice of it inside the pipeline), T learned positions, L layers, R rows of a global batch.

Modules are Flax NNX; `Transformer` splits them once into graph definitions and plain nested dictionaries of arrays, and
everything else sees pure functions of these. `side` is what a model reads beside its activations, a dictionary of arrays:
tokens_BS, targets_BS, segments_BS (-1: padding), positions_BS, weights_BS (of the loss), key_B2 (dropout, one a row); with a
cache of C places also first_B, the place where a row's text begins, and place_B, that of the first of the S tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from llm.attention import MaskSpec, attention
from llm.config import ModelConfig
from llm.kernels import cross_entropy
from llm.objective import CrossEntropy
from llm.rotary import frequencies, rotary
from parallel import vocabulary
from parallel.axes import SUM_AXES
from parallel.sharding import ParamSpec

REMAT = dict(none=None, selective=("attention", "up", "gate"), full=())
"""Remat mode -> names of the values that the backward does not compute again (None: whatever autodiff keeps)."""

INIT_STD = 0.02
ALL = 2**30  # positions to the left: as good as no window
EMBED_SALT = 2**31 - 1  # folded into a row's dropout key for the embedding; layers use twice their index and one more


def normal(std: float) -> Callable:
    return lambda key, shape: std * jax.random.normal(key, shape)


def zeros(key, shape):
    return jnp.zeros(shape)


def declare(rngs: nnx.Rngs, shape, axes, init, kind, **more) -> nnx.Param:
    """A parameter with its declaration attached: the one place where shape, axes, initialiser and kind stand."""
    spec = ParamSpec(shape, axes, init, kind, **more)
    return nnx.Param(init(rngs.params(), shape).astype(jnp.float32), spec=spec)


def dot(x: jax.Array, w: jax.Array, name: str, inputs: int = 1) -> jax.Array:
    """Every matmul of the model: contracts the last `inputs` dimensions of x with the first of w. A precision recipe and
    remat act here, by `name`."""
    return checkpoint_name(jnp.tensordot(x, w.astype(x.dtype), inputs), name)


def split_heads(x: jax.Array, tensor: int) -> jax.Array:
    """Shards the heads of [B, S, H, K] over the tensor axis, if they divide."""
    return lax.with_sharding_constraint(x, P(None, None, "tensor")) if tensor > 1 and x.shape[2] % tensor == 0 else x


def dropout(x_BSD: jax.Array, rate: float, key_B2: jax.Array, salt: jax.Array | int) -> jax.Array:
    """Dropout with one key a row, so that the mask does not depend on the layout."""
    if not rate:
        return x_BSD
    keys = jax.vmap(lambda data: jax.random.fold_in(jax.random.wrap_key_data(data), salt))(key_B2)
    keep_BSD = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x_BSD.shape[1:]))(keys)
    return jnp.where(keep_BSD, x_BSD / (1 - rate), 0)


def by_layer(values: tuple, layer: jax.Array | int) -> Any:
    """values[layer] of a layer known only at run time; of equal values simply the value."""
    return values[0] if all(np.array_equal(v, values[0]) for v in values) else jnp.asarray(values)[layer]


class Norm(nnx.Module):
    """RMS norm, or layer norm with a bias, over the last dimensions, as many as `shape` has; statistics in fp32."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs, shape=None, axes=None, **more):
        self.c, shape = c, shape or (c.width,)
        axes = axes or (None,) * len(shape)
        self.over = tuple(range(-len(shape), 0))
        one = lambda key, shape: jnp.full(shape, 1 - c.norm_offset)
        self.scale = declare(rngs, shape, axes, one, "vector", **more)
        self.bias = declare(rngs, shape, axes, zeros, "vector", **more) if c.norm == "layer" else None

    def __call__(self, x_BSD):
        x = x_BSD.astype(jnp.float32)
        if self.c.norm == "layer":
            x = x - x.mean(self.over, keepdims=True)
        x = x * lax.rsqrt(jnp.square(x).mean(self.over, keepdims=True) + self.c.norm_eps)
        x = x * (self.scale[...] + self.c.norm_offset if self.c.norm_offset else self.scale[...])
        return (x if self.bias is None else x + self.bias[...]).astype(x_BSD.dtype)


class Linear(nnx.Module):
    """x W + b with a weight of any number of input and output dimensions."""

    def __init__(self, rngs, name, shape, axes, inputs, bias, std=INIT_STD):
        self.name, self.inputs = name, inputs
        self.kernel = declare(rngs, shape, axes, normal(std), "matrix", inputs=tuple(range(inputs)), stacked=True)
        out = slice(inputs, None)
        self.bias = declare(rngs, shape[out], axes[out], zeros, "vector", stacked=True) if bias else None

    def __call__(self, x):
        y = dot(x, self.kernel[...], self.name, self.inputs)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


ACTIVATIONS = dict(
    swiglu=jax.nn.silu,
    gelu=jax.nn.gelu,
    geglu=jax.nn.gelu,
    **{name: functools.partial(jax.nn.gelu, approximate=False) for name in ("gelu-erf", "geglu-erf")},
)


class Block(nnx.Module):
    """One layer: x + attention(x), then x + MLP(x), with norms before each branch, after it, or both. The output
    projections start smaller, by 1/sqrt(2 L) (GPT-2), so that the residual stream does not grow with depth."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.c = c
        D, H, G, K, F = c.width, c.heads, c.kv_heads, c.head_dim, c.ffn
        linear = functools.partial(Linear, rngs, bias=c.bias)
        qkv = functools.partial(Linear, rngs, bias=c.bias or c.qkv_bias)
        norm = functools.partial(Norm, c, rngs, stacked=True)
        small = INIT_STD / math.sqrt(2 * c.layers)
        pre, post = c.norm_place != "post", c.norm_place != "pre"
        self.attention_norm = norm() if pre else None
        self.query = qkv("query", (D, H, K), (None, "heads", None), 1)
        self.key = qkv("key", (D, G, K), (None, "kv_heads", None), 1)
        self.value = qkv("value", (D, G, K), (None, "kv_heads", None), 1)
        of_heads = lambda n, axis: norm((K,)) if c.qk_norm == "head" else norm((n, K), (axis, None))
        self.query_norm = of_heads(H, "heads") if c.qk_norm != "none" else None
        self.key_norm = of_heads(G, "kv_heads") if c.qk_norm != "none" else None
        self.out = linear("out", (H, K, D), ("heads", None, None), 2, std=small)
        self.attention_post_norm = norm() if post else None
        self.mlp_norm = norm() if pre else None
        self.up = linear("up", (D, F), (None, "ffn"), 1)
        self.gate = linear("gate", (D, F), (None, "ffn"), 1) if c.gated else None
        self.down = linear("down", (F, D), ("ffn", None), 1, std=small)
        self.mlp_post_norm = norm() if post else None

    def __call__(self, x_BSD, side, layer, tensor: int = 1, cache=None, **kernel):
        """(x_BSD, cache). With a cache {key, value} [B, G, C, K], the S tokens also see what is in it before them.
        kernel: backend and strict of `attention`."""
        c, maybe = self.c, lambda norm, x: x if norm is None else norm(x)
        branch = lambda norm, x, salt: dropout(maybe(norm, x), c.dropout, side["key"], salt)
        h_BSD = maybe(self.attention_norm, x_BSD)
        q_BSHK, k_BSGK, v_BSGK = (split_heads(f(h_BSD), tensor) for f in (self.query, self.key, self.value))
        q_BSHK, k_BSGK = maybe(self.query_norm, q_BSHK), maybe(self.key_norm, k_BSGK)
        if c.positions == "rotary":
            frequency_K = by_layer(tuple(frequencies(c, windowed) for windowed in c.windowed), layer)
            q_BSHK, k_BSGK = (rotary(a, side["positions"], frequency_K) for a in (q_BSHK, k_BSGK))
        window = (by_layer(tuple(c.window - 1 if windowed else ALL for windowed in c.windowed), layer), 0)
        mask = MaskSpec(True, window if any(c.windowed) else None, side["segments"], side["segments"])
        if cache:
            place = side["place"][0]  # the same in every row
            write = lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new.swapaxes(1, 2), place, 2)
            cache = dict(key=write(cache["key"], k_BSGK), value=write(cache["value"], v_BSGK))
            k_BSGK, v_BSGK = (split_heads(cache[name].swapaxes(1, 2), tensor) for name in ("key", "value"))
            text_BC = jnp.arange(k_BSGK.shape[1]) >= side["first"][:, None]  # what lies behind the tokens is not causal
            mask = dataclasses.replace(mask, kv_segment_ids=jnp.where(text_BC, 0, -1), q_offset=place)
        scale, cap = (c.query_scalar or c.head_dim) ** -0.5, c.attention_softcap or None
        o_BSHK = split_heads(attention(q_BSHK, k_BSGK, v_BSGK, mask, scale=scale, softcap=cap, **kernel), tensor)
        x_BSD = x_BSD + branch(self.attention_post_norm, self.out(o_BSHK), 2 * layer)
        h_BSD = maybe(self.mlp_norm, x_BSD)
        u_BSF, act = self.up(h_BSD), ACTIVATIONS[c.mlp]
        u_BSF = act(u_BSF) if self.gate is None else act(self.gate(h_BSD)) * u_BSF
        return x_BSD + branch(self.mlp_post_norm, self.down(u_BSF), 2 * layer + 1), cache


class Embed(nnx.Module):
    """Token embeddings, split over the pipe by vocabulary, and learned positions."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.tokens = declare(rngs, (c.vocab, c.width), ("vocab", None), normal(INIT_STD), "embedding")
        learned = c.positions == "learned"
        self.positions = (
            # the first rank of the pipe adds them, so their gradient is there only
            declare(rngs, (c.max_length, c.width), (None, None), normal(INIT_STD), "embedding", sum_axes=(*SUM_AXES, "pipe"))
            if learned
            else None
        )


class Head(nnx.Module):
    """The last norm and, unless tied, an output matrix split over the pipe by vocabulary."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.norm = Norm(c, rngs)
        self.tokens = None if c.tied else declare(rngs, (c.vocab, c.width), ("vocab", None), normal(INIT_STD), "embedding")


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The model as pure functions of plain parameter dictionaries.

    params = {"layers": one block's tree, stacked; "embed": {...}, "head": {...}}. The functions that the executor calls
    (`layer`, `embed`, `embed_backward`, `head`, `nll`, `logits`) run inside its manual region; parallel/pipeline.py says
    what each must do. dtype: of activations and matmuls. tensor: size of the tensor axis. backend, strict: of attention."""

    config: ModelConfig
    dtype: Any = jnp.float32
    tensor: int = 1
    objective: CrossEntropy = dataclasses.field(default_factory=CrossEntropy)
    backend: str = "auto"
    strict: bool = False

    @functools.cached_property
    def _parts(self) -> dict[str, tuple[Any, Any]]:
        modules = dict(layers=Block, embed=Embed, head=Head)
        return {name: nnx.split(nnx.eval_shape(lambda m=m: m(self.config, nnx.Rngs(0)))) for name, m in modules.items()}

    def specs(self) -> dict[str, Any]:
        """The declaration of every parameter, a tree like the parameters."""
        is_param = lambda v: isinstance(v, nnx.Variable)
        return {
            name: nnx.to_pure_dict(jax.tree.map(lambda v: v.replace(v.get_metadata()["spec"]), state, is_leaf=is_param))
            for name, (_, state) in self._parts.items()
        }

    def init_part(self, part: str, key: jax.Array) -> dict[str, Any]:
        """Fresh fp32 parameters of `embed`, `head` or one layer of `layers`."""
        module = dict(layers=Block, embed=Embed, head=Head)[part]
        return nnx.to_pure_dict(nnx.split(module(self.config, nnx.Rngs(params=key)))[1])

    def _module(self, part: str, params: Any) -> Any:
        return nnx.merge(self._parts[part][0], params)

    def layer(self, w, ctx, state, x_BSD):
        """One layer; ctx = (global layer index, side), state its cache or {}. There is no auxiliary loss yet."""
        index, side = ctx
        kernel = dict(backend=self.backend, strict=self.strict)
        return *self._module("layers", w)(x_BSD, side, index, self.tensor, state, **kernel), {}

    def cache(self, rows: int, places: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The keys and values that one layer keeps of `rows` texts of at most so many tokens."""
        shape = (rows, self.config.kv_heads, places, self.config.head_dim)  # as attention multiplies it
        return {name: jax.ShapeDtypeStruct(shape, self.dtype) for name in ("key", "value")}

    @property
    def embed_scale(self) -> float:
        """What token embeddings are multiplied by."""
        return math.sqrt(self.config.width) if self.config.scaled_embedding else 1.0

    def embed(self, shared, side):
        """This rank's part of the embeddings x_BSD: the parts of all ranks add up to it."""
        x_BSD = vocabulary.lookup(shared["embed"]["tokens"], side["tokens"]) * self.embed_scale
        if "positions" in shared["embed"]:
            first = lax.axis_index(vocabulary.AXIS) == 0
            x_BSD = x_BSD + jnp.where(first, shared["embed"]["positions"][side["positions"]], 0)
        return dropout(x_BSD.astype(self.dtype), self.config.dropout, side["key"], EMBED_SALT)

    def embed_backward(self, shared, side, dx_BSD, grads):
        """Adds the gradient of `embed` to `grads` (like shared, fp32)."""
        dx_BSD = dropout(dx_BSD, self.config.dropout, side["key"], EMBED_SALT)
        dtokens_BSD = dx_BSD * self.embed_scale
        embed = dict(grads["embed"], tokens=vocabulary.add_rows(grads["embed"]["tokens"], side["tokens"], dtokens_BSD))
        if "positions" in embed:
            mine_BSD = jnp.where(lax.axis_index(vocabulary.AXIS) == 0, dx_BSD, 0).astype(jnp.float32)
            embed["positions"] = embed["positions"].at[side["positions"]].add(mine_BSD)
        return dict(grads, embed=embed)

    def hidden(self, norm, x_BSD):
        """What leaves the last layer, as the output head takes it."""
        return nnx.merge(self._norm, norm)(x_BSD)

    @functools.cached_property
    def _norm(self) -> Any:
        return nnx.split(nnx.eval_shape(lambda: Norm(self.config, nnx.Rngs(0))))[0]

    def _output(self, shared):
        return shared["embed" if self.config.tied else "head"]["tokens"]

    def head(self, shared, x_BSD, side, scale, grads):
        """The objective of a microbatch times `scale`: (sums, gradient of x, grads with those of shared added)."""
        h_BSD, pull = jax.vjp(self.hidden, shared["head"]["norm"], x_BSD)
        objective = lambda logp_BS, lse_BS: scale * self.objective(logp_BS, lse_BS, side)
        part, c = "embed" if self.config.tied else "head", self.config
        how = dict(separable=self.objective.separable, into=grads[part]["tokens"])
        loss, dh_BSD, dw_VD = cross_entropy.loss_and_gradients(
            h_BSD, self._output(shared), side["targets"], c.vocab, objective, c.logit_softcap, **how
        )
        dnorm, dx_BSD = pull(dh_BSD)
        head = dict(grads["head"], norm=jax.tree.map(jnp.add, grads["head"]["norm"], dnorm))
        grads = dict(grads, head=head)
        grads[part] = dict(grads[part], tokens=dw_VD)
        return {"loss": loss}, dx_BSD, grads

    def score(self, shared, x_BSD, side):
        """Forward only: negative log-likelihood and number of counted tokens of each row of a microbatch."""
        c, h_BSD = self.config, self.hidden(shared["head"]["norm"], x_BSD)
        logp_BS = cross_entropy.log_probabilities(h_BSD, self._output(shared), side["targets"], c.vocab, c.logit_softcap)
        return {"nll": -(side["weights"] * logp_BS).sum(-1), "tokens": side["weights"].sum(-1)}

    def likelihood(self, shared, x_BSD, side):
        """Forward only: of each row the log-probability of its counted targets together, and whether each is the most
        likely token."""
        c, h_BSD = self.config, self.hidden(shared["head"]["norm"], x_BSD)
        logp_BS, greedy_BS = cross_entropy.likelihood(h_BSD, self._output(shared), side["targets"], c.vocab, c.logit_softcap)
        weights_BS = side["weights"]
        return {"logprob": (weights_BS * logp_BS).sum(-1), "greedy": (greedy_BS | (weights_BS == 0)).all(-1)}

    def logits(self, shared, x_BSD, side):
        """Forward only: the logits [B, S, V], on every rank of the pipe."""
        c, h_BSD = self.config, self.hidden(shared["head"]["norm"], x_BSD)
        logits_BSV = cross_entropy.local_logits(h_BSD, self._output(shared), c.vocab, c.logit_softcap)
        return vocabulary.gather(logits_BSV)[..., : c.vocab]

    def next_logits(self, shared, x_BSD, side):
        """Forward only: the logits [B, V] at position side["last"] of each row, on every rank of the pipe."""
        return self.logits(shared, jnp.take_along_axis(x_BSD, side["last"][:, None, None], axis=1), side)[:, 0]
