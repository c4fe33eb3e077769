"""What turns gradients into updates (AdamW, Muon, SGD) and the learning rate of each update.

The transformations know neither the learning rate nor the clipping: the training step clips, calls `update`, and adds
`-lr * update`. They treat every leaf (and within a stacked leaf every layer) by itself, and run inside a shard_map on the
part of it that one device holds.
"""

import math

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from parallel.errors import UserError
from parallel.sharding import STACK_DIMS, ParamSpec, on_whole

MUON_RMS = 0.2


def learning_rate(config, steps: int):
    """Returns `rate(step)`: the learning rate of the update that takes `step` (count from 0) to `step + 1`.

    With t = step + 1 and W = config.warmup: rises as t / W, so the first update learns and the peak config.lr is used
    exactly by update W (by the first one without warm-up). Update `steps` uses exactly config.lr * config.final, and so
    does any later one.

      cosine    half a cosine from W to the last step
      wsd       the peak until config.stable * steps, then 1 - sqrt(progress) (Haegele et al. 2024, arXiv:2405.18392)
      constant  the peak
    """
    peak_at = max(config.warmup, 1)
    start = max(peak_at, round(config.stable * steps)) if config.decay == "wsd" else peak_at
    shapes = {
        "cosine": lambda x: (1 + jnp.cos(jnp.pi * x)) / 2,
        "wsd": lambda x: 1 - jnp.sqrt(x),
        "constant": jnp.ones_like,
    }
    if config.decay not in shapes:
        raise UserError(f"optimizer.decay={config.decay!r} is unknown: choose one of {', '.join(shapes)}.")

    def rate(step):
        t = jnp.asarray(step, jnp.float32) + 1
        progress = jnp.clip((t - start) / max(steps - start, 1), 0, 1)
        fraction = config.final + (1 - config.final) * shapes[config.decay](progress)
        return config.lr * jnp.where(t <= start, jnp.minimum(t / peak_at, 1), fraction)

    return rate


def make_optimizer(config, specs, partitions=None) -> optax.GradientTransformation:
    """The transformation named config.name, without learning rate and clipping; `specs`: ParamSpecs shaped like params.

    partitions: PartitionSpecs shaped like params, of which `update` gets this device's parts, in a shard_map that is manual
    over their axes; None: it gets all.

    Weight decay is decoupled and touches matrices only, by `ParamSpec.kind`: a bias may have two dimensions. State is
    fp32 whatever the dtype of parameters and gradients.

      adamw  Adam and decay.
      muon   matrices: Nesterov momentum, orthogonalised layer by layer, times 0.2 sqrt(max(fan in, fan out)), which
             gives it the usual root mean square of an AdamW update (Liu et al. 2025, arXiv:2502.16982): one learning
             rate, that of AdamW, serves both. The rest: Adam.
      sgd    momentum (0: plain gradients) and decay.

    Zero gradients of zero parameters (empty layer slots, padding) give zero updates. Raises UserError for another name.
    """
    is_spec = lambda x: isinstance(x, ParamSpec)
    matrix = jax.tree.map(lambda spec: spec.kind == "matrix", specs, is_leaf=is_spec)
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.name == "adamw":
        parts = {"adam": adam}
    elif config.name == "muon":
        whole = jax.tree.map(lambda spec: PartitionSpec(), specs, is_leaf=is_spec)
        muon = _scale_by_muon(config.momentum, specs, partitions or whole)
        rest = jax.tree.map(lambda is_matrix: not is_matrix, matrix)
        scales = jax.tree.map(_muon_scale, specs, is_leaf=is_spec)
        parts = {
            "muon": optax.masked(muon, matrix),
            "scale": optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, scales)),
            "adam": optax.masked(adam, rest),
        }
    elif config.name == "sgd":
        parts = {"momentum": optax.trace(config.momentum) if config.momentum else optax.identity()}
    else:
        raise UserError(f"optimizer.name={config.name!r} is unknown: choose one of adamw, muon, sgd.")
    chain = optax.named_chain(*parts.items(), ("decay", optax.add_decayed_weights(config.weight_decay, matrix)))

    fp32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    return optax.GradientTransformation(
        lambda params: chain.init(fp32(params)),
        lambda updates, state, params: chain.update(fp32(updates), state, fp32(params)),
    )


def like_params(optimizer: optax.GradientTransformation, optimizer_state, tree, other):
    """A pytree shaped like the optimiser state, for shardings, Stored and the like.

    Moments take the entry of `tree` (shaped like params) of their parameter; all other leaves (counters, coefficients)
    take `other`, or `other(leaf)` where it is a function.
    """
    return optax.tree_map_params(
        optimizer,
        lambda leaf, entry: leaf if isinstance(leaf, optax.MaskedNode) else entry,
        optimizer_state,
        tree,
        transform_non_params=other if callable(other) else lambda _: other,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def _scale_by_muon(beta: float, specs, partitions) -> optax.GradientTransformation:
    """optax's scale_by_muon, but whole matrices come together once, and not in each product of the orthogonalisation."""

    def update(grads, state, params=None):
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        ahead = jax.tree.map(
            lambda m, g: beta * m + (1 - beta) * g,
            optax.tree.bias_correction(mu, beta, optax.safe_increment(count)),
            optax.tree.bias_correction(grads, beta, count),
        )
        one = lambda spec, x, parts: x if isinstance(x, optax.MaskedNode) else _orthogonalised(spec, x, parts)
        updates = jax.tree.map(one, specs, ahead, partitions)
        return updates, MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(scale_by_muon(beta=beta).init, update)


def _orthogonalised(spec: ParamSpec, x: jax.Array, parts: PartitionSpec) -> jax.Array:
    """This device's part of the orthogonalised matrices, layer by layer; x: its part of the matrices."""
    stack = STACK_DIMS if spec.stacked else 0
    outputs = sorted(set(range(len(spec.shape))) - set(spec.inputs))
    dims = MuonDimensionNumbers(tuple(1 + d for d in spec.inputs), tuple(1 + d for d in outputs))
    alone = scale_by_muon(beta=0.0, weight_dimension_numbers=dims)  # without momentum it does nothing else
    run = lambda x_N: alone.update(x_N, alone.init(x_N))[0]
    return on_whole(run, x.reshape(-1, *x.shape[stack:]), PartitionSpec(None, *parts[stack:])).reshape(x.shape)


def _muon_scale(spec: ParamSpec) -> float:
    """The factor that brings an orthogonalised update to a root mean square of MUON_RMS; 1 for what is no matrix."""
    if spec.kind != "matrix":
        return 1.0
    fan_in = math.prod(spec.shape[d] for d in spec.inputs)
    return MUON_RMS * math.sqrt(max(fan_in, math.prod(spec.shape) // fan_in))
