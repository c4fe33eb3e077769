"""Where parameters live: their declaration, the slots that layers get, shardings in memory and the form on disk."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from parallel.axes import SUM_AXES
from parallel.errors import UserError
from parallel.schedule.table import place

RULES = dict(vocab=("pipe", "tensor"), heads=("tensor",), kv_heads=("tensor",), ffn=("tensor",))
"""Logical axis of a parameter -> the mesh axes that split it; axes that are not named here stay whole."""

STACK_DIMS = 3
"""A per-layer parameter is [chunks, pipe, slots, *shape] in memory."""

PADDED = ("vocab",)
"""Logical axes that are padded with zeros until they divide; the others stay whole when they do not."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The one declaration of a parameter, from which initialisation, sharding, checkpoint and costs follow.

    shape and axes (logical names, None = never split) are those of one layer when `stacked`, and never padded.
    kind: `matrix` (decayed, orthogonalised by Muon), `vector` (norms, biases) or `embedding`.
    inputs: the dimensions of a matrix that a matmul contracts. sum_axes: the mesh axes its gradient is summed over."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    kind: str
    inputs: tuple[int, ...] = ()
    stacked: bool = False
    sum_axes: tuple[str, ...] = SUM_AXES


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which global layer sits in which slot. index_CPL [chunks, pipe, slots] holds global layers, -1 for an empty slot."""

    layers: int
    index_CPL: np.ndarray

    @property
    def slots(self) -> int:
        return self.index_CPL.shape[2]

    @property
    def full(self) -> bool:
        """Whether every slot has a layer."""
        return bool((self.index_CPL >= 0).all())


def make_layout(layers: int, placement: str, pipe: int, chunks: int, per_chunk: tuple[int, ...] = ()) -> Layout:
    """Places `layers` in order on pipe * chunks stages: per_chunk layers on each stage, or as evenly as they divide.

    Raises UserError when per_chunk does not name every stage or does not add up to `layers`."""
    stages = pipe * chunks
    counts = per_chunk or tuple(layers // stages + (s < layers % stages) for s in range(stages))
    if len(counts) != stages or sum(counts) != layers or min(counts) < 0:
        raise UserError(
            f"pipeline.layers_per_chunk names {len(counts)} chunks with {sum(counts)} layers in all; "
            f"pipe {pipe} with {chunks} chunks a rank needs {stages} numbers that add up to {layers}"
        )
    index_CPL = np.full((chunks, pipe, max(1, *counts)), -1)
    first = 0
    for stage, count in enumerate(counts):
        rank, chunk = place(placement, pipe, chunks, stage)
        index_CPL[chunk, rank, :count] = first + np.arange(count)
        first += count
    return Layout(layers, index_CPL)


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a leaf in memory maps to its canonical array on disk.

    shape: on disk, unpadded, [layers, ...] when stacked. index_CPL: which layer is in which slot of a stacked leaf
    (-1: an empty slot, zeros), None for other leaves. What memory has beyond the disk's dimensions is zero padding."""

    shape: tuple[int, ...]
    index_CPL: np.ndarray | None = None


def stored(spec: ParamSpec, layout: Layout) -> Stored:
    """The canonical form of a parameter, which no layout changes."""
    return Stored((layout.layers, *spec.shape), layout.index_CPL) if spec.stacked else Stored(spec.shape)


def memory_shape(spec: ParamSpec, layout: Layout, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape in memory: [chunks, pipe, slots, ...] when stacked, and padded to what the mesh axes divide."""
    padded = tuple(
        -(-n // _ways(axis, sizes)) * _ways(axis, sizes) if axis in PADDED else n for n, axis in zip(spec.shape, spec.axes)
    )
    return (*layout.index_CPL.shape, *padded) if spec.stacked else padded


def _ways(axis: str | None, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[a] for a in RULES.get(axis, ()))


def partition(spec: ParamSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    """How compute sees a parameter: layers over `pipe`, logical axes by RULES, whole over the batch axes."""
    own = [
        RULES[axis] if axis in RULES and (axis in PADDED or n % _ways(axis, sizes) == 0) else None
        for n, axis in zip(spec.shape, spec.axes)
    ]
    own = [axes[0] if axes and len(axes) == 1 else axes for axes in own]
    return PartitionSpec(*(None, "pipe", None) if spec.stacked else (), *own)


def zero_dim(spec: ParamSpec, layout: Layout, sizes: Mapping[str, int], zero: int) -> int | None:
    """The dimension of a leaf in memory that ZeRO splits over `data`, one that it divides and nothing else splits, or None:
    chunks or slots, so that each rank has whole layers (Muon needs them), else the largest."""
    if not zero or sizes["data"] == 1:
        return None
    shape, axes = memory_shape(spec, layout, sizes), partition(spec, sizes)
    free = [d for d, n in enumerate(shape) if _split(axes[d], sizes) == 1 and n % sizes["data"] == 0]
    stack = [d for d in free if spec.stacked and d < STACK_DIMS]
    return max(stack or free, key=lambda d: (shape[d], d), default=None)


def _split(axes: str | tuple[str, ...] | None, sizes: Mapping[str, int]) -> int:
    """Into how many parts the entry of a partition cuts its dimension."""
    return math.prod(sizes[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))


def with_axis(spec: PartitionSpec, dim: int | None, axis: str) -> PartitionSpec:
    """The same partition with one more dimension split."""
    return spec if dim is None else PartitionSpec(*spec[:dim], axis, *spec[dim + 1 :])


def manual_part(spec: PartitionSpec, manual: tuple[str, ...]) -> PartitionSpec:
    """Only the manual axes of a partition: what shard_map's in_specs and out_specs may name."""

    def keep(axes):
        names = tuple(a for a in ((axes,) if isinstance(axes, str) else axes or ()) if a in manual)
        return names if len(names) > 1 else names[0] if names else None

    return PartitionSpec(*(keep(axes) for axes in spec))


def automatic_part(spec: PartitionSpec, manual: tuple[str, ...]) -> PartitionSpec:
    """Only the axes left to the compiler: what a sharding constraint inside shard_map may name."""
    names = [() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in spec]
    kept = [tuple(a for a in axes if a not in manual) for axes in names]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))


def on_whole(run: Callable[[jax.Array], jax.Array], x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """This device's part of run(whole x), inside a shard_map that is manual over the axes in `spec`.

    x: this device's part of N arrays [N, ...] that `spec` splits, but not in the first dimension; `run` keeps shapes and
    treats each of the N by itself. The devices that hold parts of the same arrays share these out: each sends its parts
    and gets whole arrays, N / devices of them, and the results go back. A single array is gathered, and all compute it."""
    part, axes = x.shape[1:], [*spec[1:], *[None] * x.ndim][: x.ndim - 1]
    ways = [lax.axis_size(a) if a else 1 for a in axes]
    names = tuple(name for a in axes if a for name in ((a,) if isinstance(a, str) else a))
    devices, dims = math.prod(ways), len(part)
    if devices == 1:
        return run(x)
    share = -(-len(x) // devices)
    order = [dims, *(i for d in range(dims) for i in (d, dims + 1 + d))]  # [*ways, N, *part] -> [N, way, part, way, part, ...]

    def join(parts):  # [devices, N, *part] -> [N, *whole]
        x = parts.reshape(*ways, -1, *part).transpose(order)
        return x.reshape(-1, *(w * n for w, n in zip(ways, part)))

    def cut(x):
        x = x.reshape(-1, *(n for pair in zip(ways, part) for n in pair))
        return x.transpose(np.argsort(order)).reshape(devices, -1, *part)

    if len(x) == 1:
        return cut(run(join(lax.all_gather(x, names))))[lax.axis_index(names)]
    exchange = lambda parts: lax.all_to_all(parts, names, 0, 0)
    parts = exchange(pad(x, (devices * share, *part)).reshape(devices, share, *part))
    return exchange(cut(run(join(parts)))).reshape(-1, *part)[: len(x)]


def pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x with zeros appended until it has `shape`."""
    return jnp.pad(x, [(0, n - k) for n, k in zip(shape, x.shape)]) if x.shape != shape else x
