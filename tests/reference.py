"""The plain single-device computation that parallel code is compared with, and batches and configurations for it.

It shares with the pipeline the modules of one layer and one norm, and nothing else: no mesh, no executor, no cut into F, B
and W, no split vocabulary, no optimiser library."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from llm.config import Config
from llm.model import EMBED_SALT, Transformer, dropout
from llm.step import Program


def batch(rows: int, length: int, vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows with unequal numbers of counted tokens: two documents a row, then padding; one row is all padding."""
    r = np.random.default_rng(seed)
    tokens, targets = (r.integers(0, vocab, (rows, length)).astype(np.int32) for _ in range(2))
    segments = np.full((rows, length), -1, np.int32)
    positions = np.zeros((rows, length), np.int32)
    weights = np.zeros((rows, length), np.float32)
    for i in range(rows):
        first, second = r.integers(2, length // 2), r.integers(1, length // 2)
        if rows > 2 and i == rows - 2:
            continue
        for segment, start, n in ((0, 0, first), (1, first, second)):
            segments[i, start : start + n] = segment
            positions[i, start : start + n] = np.arange(n)
            weights[i, start : start + n - 1] = 1
    return dict(
        tokens=tokens,
        targets=targets,
        segments=segments,
        positions=positions,
        weights=weights,
        example=np.arange(rows, dtype=np.int32),
    )


def forward(model: Transformer, params: dict, side: dict) -> jax.Array:
    """Logits [R, S, V] of canonical parameters (layers stacked in order, vocabulary unpadded)."""
    c = model.config
    x = params["embed"]["tokens"][side["tokens"]] * model.embed_scale
    if "positions" in params["embed"]:
        x = x + params["embed"]["positions"][side["positions"]]
    x = dropout(x, c.dropout, side["key"], EMBED_SALT)
    one = lambda x, xs: (model.layer(xs[0], (xs[1], side), {}, x)[0], None)
    x, _ = jax.lax.scan(one, x, (params["layers"], jnp.arange(c.layers)))
    x = model.hidden(params["head"]["norm"], x)
    logits = jnp.einsum("rsd,vd->rsv", x, params["embed" if c.tied else "head"]["tokens"])
    return c.logit_softcap * jnp.tanh(logits / c.logit_softcap) if c.logit_softcap else logits


def loss(model: Transformer, params: dict, side: dict) -> jax.Array:
    """Mean over the counted tokens, with the z-loss."""
    logits = forward(model, params, side)
    lse = jax.nn.logsumexp(logits, axis=-1)
    logp = jnp.take_along_axis(logits, side["targets"][..., None], -1)[..., 0] - lse
    return (side["weights"] * (model.config.z_loss * lse**2 - logp)).sum() / side["weights"].sum()


def step(config: Config, params: dict, rows: dict, lr: float, clip: float) -> dict:
    """Loss, gradients, gradient norm and parameters after one SGD step, on one device."""
    model = Transformer(config.model.resolved(), jnp.float32, 1)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.train.seed), 2**31 - 1), 0)
    keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(rows["example"])
    value, grads = _value_and_grad(model)(params, dict(rows, key=keys))
    norm = np.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in jax.tree.leaves(grads)))
    factor = lr * (min(1.0, clip / norm) if clip else 1.0)
    stepped = jax.tree.map(lambda p, g: p - factor * g, params, grads)
    return dict(loss=value, grads=grads, grad_norm=norm, params=stepped)


@functools.lru_cache(maxsize=64)
def _value_and_grad(model):
    return jax.jit(jax.value_and_grad(functools.partial(loss, model)))


def canonical(program: Program, tree: dict) -> dict:
    """Parameters (or gradients) of a program as the reference wants them: layers in order, unpadded."""

    def one(spec, a):
        a = np.asarray(jax.device_get(a))
        if spec.stacked:
            index = program.layout.index_CPL
            layers = np.zeros((program.layout.layers, *a.shape[3:]), a.dtype)
            layers[index[index >= 0]] = a[index >= 0]
            assert not np.any(a[index < 0]), "an empty layer slot is not zero"
            a = layers
        inside = (slice(None),) * spec.stacked + tuple(slice(0, n) for n in spec.shape)
        padding = np.ones(a.shape, bool)
        padding[inside] = False
        assert not np.any(a[padding]), "the padding of a parameter is not zero"
        return a[inside]

    return jax.tree.map(one, program.specs, tree)


def place(program: Program, params: dict) -> dict:
    """{params, optimizer}: canonical parameters on the program's mesh in its memory form, and a fresh optimiser state."""
    index = program.layout.index_CPL

    def one(spec, shape, sharding, a):
        full = np.zeros(shape.shape, np.float32)
        inside = tuple(slice(0, n) for n in spec.shape)
        if spec.stacked:
            for where in np.argwhere(index >= 0):
                full[tuple(where)] = a[index[tuple(where)]]
        else:
            full[inside] = a
        return jax.make_array_from_callback(full.shape, sharding, lambda i: full[i])

    abstract = program.abstract_state()
    params = jax.tree.map(one, program.specs, abstract["params"], program.shardings["params"], params)
    fresh = lambda s: jax.make_array_from_callback(s.shape, s.sharding, lambda i: np.zeros(s.shape, s.dtype)[i])
    return dict(params=params, optimizer=jax.tree.map(fresh, abstract["optimizer"]))


def difference(want: dict, got: dict) -> dict[str, float]:
    """Largest difference of each leaf, relative to the largest value of the wanted leaf.

    A gradient that is zero but for rounding (the key bias without rotary positions: softmax does not see it) is compared
    with the largest value of any leaf of its group instead."""
    flat = jax.tree_util.tree_leaves_with_path(want)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    wanted = [np.asarray(leaf) for _, leaf in flat]
    group = lambda name: name.partition("/")[0]
    top = {}
    for name, a in zip(names, wanted):
        top[group(name)] = max(top.get(group(name), 0.0), float(np.abs(a).max()))
    result = {}
    for name, a, b in zip(names, wanted, jax.tree.leaves(got)):
        scale = float(np.abs(a).max())
        scale = scale if scale > 1e-6 * top[group(name)] else top[group(name)]
        gap = float(np.abs(a - np.asarray(b)).max())
        result[name] = gap / scale if np.isfinite(gap) else float("inf")
    return result


def replace(config: Config, **parts: dict) -> Config:
    """A configuration with some fields changed: replace(c, model=dict(layers=3))."""
    changed = {k: dataclasses.replace(getattr(config, k), **v) if isinstance(v, dict) else v for k, v in parts.items()}
    return dataclasses.replace(config, **changed)
