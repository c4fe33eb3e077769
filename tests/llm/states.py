"""Training states of a model that fits no layout evenly, in many layouts, for tests of checkpoints."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import llm.checkpoint
from llm.checkpoint import Checkpoints
from llm.optimizer import like_params, make_optimizer
from parallel import sharding
from parallel.mesh import make_mesh
from parallel.sharding import ParamSpec, Stored

LAYERS, WIDTH, VOCAB = 7, 8, 11  # 7 layers fit no layout evenly; 11 rows are padded wherever the vocabulary is split


def spec(shape, axes, kind, inputs=(), stacked=True):
    return ParamSpec(shape, axes, lambda key, shape: None, kind, inputs, stacked)


SPECS = {
    "block": {
        "norm": spec((WIDTH,), (None,), "vector"),
        "query": spec((WIDTH, 4, 2), (None, "heads", None), "matrix", (0,)),
    },
    "embedding": spec((VOCAB, WIDTH), ("vocab", None), "embedding", stacked=False),
    "norm": spec((WIDTH,), (None,), "vector", stacked=False),
}

LAYOUTS = {
    "one": {},
    "pipe4": {"pipe": 4},
    "pipe2 v2": {"pipe": 2, "chunks": 2},
    "pipe2 v3 data2 zero": {"pipe": 2, "chunks": 3, "data": 2, "zero": 1},
    "v placement": {"pipe": 2, "chunks": 2, "placement": "v", "tensor": 2},
    "pipe4 v2 tensor2": {"pipe": 4, "chunks": 2, "tensor": 2},
    "replica2 data2 tensor2 zero": {"replica": 2, "data": 2, "tensor": 2, "zero": 1},
    "by hand": {"pipe": 2, "chunks": 2, "per_chunk": (3, 0, 1, 3), "data": 4, "zero": 1},
}


class Setup:
    """A layout's mesh, and how the training state of SPECS looks in it."""

    def __init__(self, pipe=1, chunks=1, placement="loop", per_chunk=(), zero=0, optimizer="muon", layers=LAYERS, **mesh):
        self.mesh = make_mesh({"pipe": pipe, **mesh})
        layout = sharding.make_layout(layers, placement, pipe, chunks, per_chunk)
        sizes = dict(self.mesh.shape)
        is_spec = lambda x: isinstance(x, ParamSpec)
        over = lambda f: jax.tree.map(f, SPECS, is_leaf=is_spec)
        config = types.SimpleNamespace(name=optimizer, weight_decay=0.1, b1=0.9, b2=0.95, eps=1e-8, momentum=0.9)
        transform = make_optimizer(config, SPECS)

        def shard(s, zero):
            parts = sharding.partition(s, sizes)
            return NamedSharding(self.mesh, sharding.with_axis(parts, sharding.zero_dim(s, layout, sizes, zero), "data"))

        params = over(lambda s: jax.ShapeDtypeStruct(sharding.memory_shape(s, layout, sizes), jnp.float32))
        optimizer = jax.eval_shape(transform.init, params)
        alone = NamedSharding(self.mesh, PartitionSpec())
        self.stored = {
            "step": Stored(()),
            "params": over(lambda s: sharding.stored(s, layout)),
            "optimizer": like_params(
                transform, optimizer, over(lambda s: sharding.stored(s, layout)), lambda leaf: Stored(leaf.shape)
            ),
        }
        shardings = {
            "step": alone,
            "params": over(lambda s: shard(s, 0)),
            "optimizer": like_params(transform, optimizer, over(lambda s: shard(s, zero)), alone),
        }
        shapes = {"step": jax.ShapeDtypeStruct((), jnp.int32), "params": params, "optimizer": optimizer}
        self.abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    def expected(self, seed=0):
        """The state as numpy arrays in this layout's memory form; the canonical values depend on the seed only."""
        found, leaves, forms, tree = llm.checkpoint._flatten(self.abstract, self.stored)
        return tree.unflatten(map(self._in_memory, found, leaves, forms, [seed] * len(found)))

    def _in_memory(self, name, leaf, form, seed):
        value, out = canonical(name, form.shape, leaf.dtype, seed), np.zeros(leaf.shape, leaf.dtype)
        if form.index_CPL is None:
            out[tuple(slice(0, n) for n in form.shape)] = value
        else:
            out[form.index_CPL >= 0] = value[form.index_CPL[form.index_CPL >= 0]]
        return out

    def state(self, seed=0):
        return jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), self.expected(seed), self.abstract)


def canonical(name, shape, dtype, seed):
    bits = np.random.default_rng([seed, *name.encode()]).integers(1, 1000, shape)
    return np.asarray(bits, np.int32) if np.issubdtype(dtype, np.integer) else np.asarray(1 / bits, np.float32)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def save(folder, setup, *steps, keep=9):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, setup.state(step), setup.stored, {"step": step})
    checkpoints.close()


def flip(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
