"""The decoder-only transformer: embed, blocks, head. GPT-2 and Llama shapes by configuration.

Letters: B rows, S positions, D width, H heads, G heads of keys and values, K size of a head, F hidden size of the MLP,
V vocabulary (this rank's slice of it inside the pipeline), T learned positions, L layers, R rows of a global batch.

Modules are Flax NNX; `Transformer` splits them once into graph definitions and plain nested dictionaries of arrays, and
everything else sees pure functions of these. `side` is what a model reads beside its activations, a dictionary of arrays:
tokens_BS, targets_BS, segments_BS (-1: padding), positions_BS, weights_BS (of the loss), key_B2 (dropout, one a row).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from llm.attention import MaskSpec, attention
from llm.config import ModelConfig
from llm.kernels import cross_entropy
from llm.objective import CrossEntropy
from parallel import vocabulary
from parallel.axes import SUM_AXES
from parallel.sharding import ParamSpec

REMAT = dict(none=None, selective=("attention", "up", "gate"), full=())
"""Remat mode -> names of the values that the backward does not compute again (None: whatever autodiff keeps)."""

INIT_STD = 0.02
EMBED_SALT = 2**31 - 1  # folded into a row's dropout key for the embedding; layers use twice their index and one more


def normal(std: float) -> Callable:
    return lambda key, shape: std * jax.random.normal(key, shape)


def ones(key, shape):
    return jnp.ones(shape)


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


def rotary(x_BSHK: jax.Array, positions_BS: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of the halves of each head (RoFormer, arXiv 2104.09864); angles in fp32 whatever x is."""
    half = x_BSHK.shape[-1] // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BS1K = positions_BS[..., None, None].astype(jnp.float32) * frequency_K
    cos, sin = jnp.cos(angle_BS1K), jnp.sin(angle_BS1K)
    a, b = x_BSHK[..., :half].astype(jnp.float32), x_BSHK[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BSHK.dtype)


class Norm(nnx.Module):
    """RMS norm, or layer norm with a bias; statistics in fp32."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs, **more):
        self.c = c
        self.scale = declare(rngs, (c.width,), (None,), ones, "vector", **more)
        self.bias = declare(rngs, (c.width,), (None,), zeros, "vector", **more) if c.norm == "layer" else None

    def __call__(self, x_BSD):
        x = x_BSD.astype(jnp.float32)
        if self.c.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.c.norm_eps) * self.scale[...]
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


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + MLP(norm(x)). The output projections start smaller, by 1/sqrt(2 L)
    (GPT-2), so that the residual stream does not grow with depth."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.c = c
        D, H, G, K, F = c.width, c.heads, c.kv_heads, c.head_dim, c.ffn
        linear = functools.partial(Linear, rngs, bias=c.bias)
        small = INIT_STD / math.sqrt(2 * c.layers)
        self.attention_norm = Norm(c, rngs, stacked=True)
        self.query = linear("query", (D, H, K), (None, "heads", None), 1)
        self.key = linear("key", (D, G, K), (None, "kv_heads", None), 1)
        self.value = linear("value", (D, G, K), (None, "kv_heads", None), 1)
        self.out = linear("out", (H, K, D), ("heads", None, None), 2, std=small)
        self.mlp_norm = Norm(c, rngs, stacked=True)
        self.up = linear("up", (D, F), (None, "ffn"), 1)
        self.gate = linear("gate", (D, F), (None, "ffn"), 1) if c.mlp == "swiglu" else None
        self.down = linear("down", (F, D), ("ffn", None), 1, std=small)

    def __call__(self, x_BSD, side, layer, tensor: int = 1):
        h_BSD = self.attention_norm(x_BSD)
        q_BSHK, k_BSGK, v_BSGK = (split_heads(f(h_BSD), tensor) for f in (self.query, self.key, self.value))
        if self.c.positions == "rotary":
            q_BSHK, k_BSGK = (rotary(a, side["positions"], self.c.rope_theta) for a in (q_BSHK, k_BSGK))
        mask = MaskSpec(causal=True, q_segment_ids=side["segments"], kv_segment_ids=side["segments"])
        o_BSHK = split_heads(attention(q_BSHK, k_BSGK, v_BSGK, mask), tensor)
        x_BSD = x_BSD + dropout(self.out(o_BSHK), self.c.dropout, side["key"], 2 * layer)
        h_BSD = self.mlp_norm(x_BSD)
        u_BSF = self.up(h_BSD)
        u_BSF = jax.nn.gelu(u_BSF) if self.gate is None else jax.nn.silu(self.gate(h_BSD)) * u_BSF
        return x_BSD + dropout(self.down(u_BSF), self.c.dropout, side["key"], 2 * layer + 1)


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
    what each must do. dtype: of activations and matmuls. tensor: size of the tensor axis."""

    config: ModelConfig
    dtype: Any = jnp.float32
    tensor: int = 1
    objective: CrossEntropy = dataclasses.field(default_factory=CrossEntropy)

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
        """One layer; ctx = (global layer index, side). There is no state and no auxiliary loss yet."""
        index, side = ctx
        return self._module("layers", w)(x_BSD, side, index, self.tensor), state, {}

    def embed(self, shared, side):
        """This rank's part of the embeddings x_BSD: the parts of all ranks add up to it."""
        x_BSD = vocabulary.lookup(shared["embed"]["tokens"], side["tokens"])
        if "positions" in shared["embed"]:
            first = lax.axis_index(vocabulary.AXIS) == 0
            x_BSD = x_BSD + jnp.where(first, shared["embed"]["positions"][side["positions"]], 0)
        return dropout(x_BSD.astype(self.dtype), self.config.dropout, side["key"], EMBED_SALT)

    def embed_backward(self, shared, side, dx_BSD, grads):
        """Adds the gradient of `embed` to `grads` (like shared, fp32)."""
        dx_BSD = dropout(dx_BSD, self.config.dropout, side["key"], EMBED_SALT)
        embed = dict(grads["embed"], tokens=vocabulary.add_rows(grads["embed"]["tokens"], side["tokens"], dx_BSD))
        if "positions" in embed:
            mine_BSD = jnp.where(lax.axis_index(vocabulary.AXIS) == 0, dx_BSD, 0).astype(jnp.float32)
            embed["positions"] = embed["positions"].at[side["positions"]].add(mine_BSD)
        return dict(grads, embed=embed)

    def _hidden(self, norm, x_BSD):
        return nnx.merge(self._norm, norm)(x_BSD)

    @functools.cached_property
    def _norm(self) -> Any:
        return nnx.split(nnx.eval_shape(lambda: Norm(self.config, nnx.Rngs(0))))[0]

    def _output(self, shared):
        return shared["embed" if self.config.tied else "head"]["tokens"]

    def head(self, shared, x_BSD, side, scale, grads):
        """The objective of a microbatch times `scale`: (sums, gradient of x, grads with those of shared added)."""
        h_BSD, pull = jax.vjp(self._hidden, shared["head"]["norm"], x_BSD)
        objective = lambda logp_BS, lse_BS: scale * self.objective(logp_BS, lse_BS, side)
        loss, dh_BSD, dw_VD = cross_entropy.loss_and_gradients(
            h_BSD, self._output(shared), side["targets"], self.config.vocab, objective
        )
        dnorm, dx_BSD = pull(dh_BSD)
        head = dict(grads["head"], norm=jax.tree.map(jnp.add, grads["head"]["norm"], dnorm))
        part = "embed" if self.config.tied else "head"
        grads = dict(grads, head=head)
        grads[part] = dict(grads[part], tokens=grads[part]["tokens"] + dw_VD)
        return {"loss": loss}, dx_BSD, grads

    def score(self, shared, x_BSD, side):
        """Forward only: negative log-likelihood and number of counted tokens of each row of a microbatch."""
        h_BSD = self._hidden(shared["head"]["norm"], x_BSD)
        logp_BS = cross_entropy.log_probabilities(h_BSD, self._output(shared), side["targets"], self.config.vocab)
        return {"nll": -(side["weights"] * logp_BS).sum(-1), "tokens": side["weights"].sum(-1)}

    def next_logits(self, shared, x_BSD, side):
        """Forward only: the logits [B, V] at position side["last"] of each row, on every rank of the pipe."""
        x_B1D = jnp.take_along_axis(x_BSD, side["last"][:, None, None], axis=1)
        h_B1D = self._hidden(shared["head"]["norm"], x_B1D)
        logits_BV = cross_entropy.local_logits(h_B1D, self._output(shared), self.config.vocab)[:, 0]
        return vocabulary.gather(logits_BV)[:, : self.config.vocab]
