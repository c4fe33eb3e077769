"""Pipelined gradients and forward passes as functions of global arrays: one XLA program on the whole mesh.

One shard_map that is manual over every axis but `tensor`. Inside it, once a step: weights are cast and gathered, the tick
table runs (executor.py), gradients and sums are reduced over the batch axes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallel.axes import BATCH_AXES, MANUAL_AXES, SUM_AXES
from parallel.executor import Executor
from parallel.schedule.slots import Rows, lower
from parallel.schedule.ticks import TickTable
from parallel.sharding import Layout, ParamSpec, automatic_part, manual_part, partition, with_axis, zero_dim

Tree = Any


class Model(Protocol):
    """What the executor needs to know of a model. All run inside the manual region; `shared` is params without "layers".

    `carry` travels along the pipe: any pytree of arrays. `side` is what belongs to a microbatch and is not sent. `sums` is a
    dictionary of scalars added over ticks. Nothing that JAX differentiates here (`layer`) may contain a collective."""

    def layer(self, w: Tree, ctx: Tree, state: Tree, carry: Tree) -> tuple[Tree, Tree, dict]:
        """One layer, ctx = (global layer index, side): (carry, state, sums). State is written in F, never differentiated."""

    def embed(self, shared: Tree, side: Tree) -> Tree:
        """This rank's part of the first carry: the parts of all pipe ranks add up to it."""

    def embed_backward(self, shared: Tree, side: Tree, dcarry: Tree, grads: Tree) -> Tree:
        """`grads` (like shared) with the gradient of `embed` added."""

    def head(self, shared: Tree, carry: Tree, side: Tree, scale: jax.Array, grads: Tree) -> tuple[dict, Tree, Tree]:
        """The objective of a microbatch times scale: (sums, gradient of carry, grads with those of shared added)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """All static facts of a compiled step: what is laid out where, and how slots run.

    remat: names of the values that the backward keeps (None: all that autodiff keeps). seeds: cotangents of a layer's `sums`.
    unroll: the layers of a chunk one after another in the program (a GPU then overlaps them with sums over `tensor`) or a loop.
    apart: (forward only, one stage with one microbatch, so that nothing is idle) the layers of params and the state are tuples
    over layers, the state without leading dimensions: on a CPU a slice of an array that holds all layers is a copy.
    poison: unwritten buffers and skipped slots hold NaN instead of zeros, for the test that nothing reads them.
    stamp: called on the host as stamp(rank, tick, _) when a rank has computed a tick; None: no time stamps."""

    mesh: Mesh
    layout: Layout
    specs: Tree
    ticks: TickTable
    rows: Rows
    idle: str = "skip"
    remat: tuple[str, ...] | None = ()
    zero: int = 0
    dtype: Any = jnp.float32
    seeds: Tree = dataclasses.field(default_factory=dict)
    state_per_microbatch: bool = False
    unroll: bool = False
    apart: bool = False
    poison: bool = False
    stamp: Callable[[Any, Any, Any], None] | None = None

    @property
    def table(self) -> dict[str, np.ndarray]:
        """The rows as arguments of the compiled step."""
        return dict(ranks=self.rows.ranks, joint=self.rows.joint)

    def param_specs(self) -> Tree:
        """How parameters and optimiser state are sharded in memory (ZeRO: also over `data`)."""
        return jax.tree.map(lambda s: with_axis(partition(s, self.mesh.shape), self.zero_dim(s), "data"), self.specs)

    def zero_dim(self, spec: ParamSpec) -> int | None:
        """The dimension of a parameter in memory that ZeRO splits over `data`."""
        return zero_dim(spec, self.layout, self.mesh.shape, self.zero)

    def manual_specs(self) -> Tree:
        """What shard_map is told of the parameters."""
        return jax.tree.map(lambda spec: manual_part(spec, MANUAL_AXES), self.param_specs())


def make_plan(mesh: Mesh, layout: Layout, specs: Tree, ticks: TickTable, **options: Any) -> Plan:
    """A plan that runs `ticks` with its own rows."""
    return Plan(mesh, layout, specs, ticks, lower(ticks), **options)


TABLE = dict(ranks=P(None, "pipe"), joint=P())  # leaves of table
SIDE = P(None, BATCH_AXES)  # leaves of side: [microbatches, rows, ...]
STATE = P(None, "pipe")  # leaves of state: [chunks, pipe, (microbatches,) slots, ...]
STATE_APART = P(BATCH_AXES)  # the same where layers are apart: [rows, ...]
STATE_OF_ROWS = P(None, "pipe", None, None, BATCH_AXES)  # those that hold something of every row: [..., slots, rows, ...]


def gradients(model: Model, plan: Plan, denominator: Callable[[Tree], jax.Array]) -> Callable:
    """step(params, state, side, table) -> (sums, grads, state), to be called under jit and `jax.set_mesh(plan.mesh)`.

    side: leaves [M, rows, ...] of the global batch. The loss is the sum over all microbatches of `model.head`, divided by
    `denominator(side)` summed over the batch axes, known before the first tick. grads: fp32, like params, summed over the
    batch axes once per leaf, sharded like the optimiser state."""

    def run(params, state, side, index_CPL, table):
        scale = 1 / lax.psum(denominator(side), SUM_AXES)
        executor = Executor(model, plan, _gathered(plan, params), side, index_CPL[:, 0], scale)
        end = executor.run(state, table)
        grads = dict(end["g_shared"], layers=jax.tree.map(lambda g: g[:, None], end["g_layers"]))
        sums = jax.tree.map(lambda s: lax.psum(s, SUM_AXES), {**end["sums"], **end["layer_sums"]})
        return sums, _reduced(plan, grads), end["state"]

    specs = plan.manual_specs()
    return _manual(plan, run, (specs, STATE, SIDE), (P(), specs, STATE))


def outputs(model: Model, plan: Plan, predict: Callable[[Tree, Tree, Tree], Tree], sharding: P = STATE) -> Callable:
    """step(params, state, side, table) -> (predict's outputs, state): the same executor on a forward-only table.

    predict(shared, carry, side) runs in the vocabulary slot, on all ranks together; its leaves [rows, ...] come back as
    [M, rows, ...]. sharding: STATE, STATE_OF_ROWS or STATE_APART."""

    def run(params, state, side, index_CPL, table):
        executor = Executor(model, plan, _gathered(plan, params), side, index_CPL[:, 0], None, predict)
        end = executor.run(state, table)
        return end["out"], end["state"]

    return _manual(plan, run, (plan.manual_specs(), sharding, SIDE), (SIDE, sharding))


def _manual(plan: Plan, run: Callable, in_specs: tuple, out_specs: tuple) -> Callable:
    index_CPL = np.asarray(plan.layout.index_CPL, np.int32)
    mapped = jax.shard_map(
        run,
        mesh=plan.mesh,
        in_specs=(*in_specs, P(None, "pipe"), TABLE),
        out_specs=out_specs,
        axis_names=set(MANUAL_AXES),
        check_vma=False,  # with checking, a kernel's interpreter stops at literals and a custom VJP at its type
    )
    return lambda params, state, side, table: mapped(params, state, side, jnp.asarray(index_CPL), table)


def _gathered(plan: Plan, params: Tree) -> Tree:
    """Parameters in compute precision, whole over `data`: cast first, then gathered, once per step."""

    def one(spec, x):
        x = x if spec.kind == "vector" else x.astype(plan.dtype)  # a norm's scale is cheap and wants fp32
        dim = plan.zero_dim(spec)
        return x if dim is None else lax.all_gather(x, "data", axis=dim, tiled=True)

    return _by_device(plan, lambda params: jax.tree.map(one, plan.specs, params))(params)


def _reduced(plan: Plan, grads: Tree) -> Tree:
    """Gradients summed over the axes that their parameters declare; with ZeRO each `data` rank gets its share."""

    def one(spec, g):
        dim, axes = plan.zero_dim(spec), spec.sum_axes
        if dim is not None:
            g = lax.psum_scatter(g, "data", scatter_dimension=dim, tiled=True)
            axes = tuple(a for a in axes if a != "data")
        return lax.psum(g, tuple(a for a in axes if plan.mesh.shape[a] > 1))

    return _by_device(plan, lambda grads: jax.tree.map(one, plan.specs, grads))(grads)


def _by_device(plan: Plan, run: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """`run` (parameters to parameters) manual over `tensor` too: left to the compiler, a leaf is gathered over `tensor`
    before it may be gathered or scattered over `data`, and stays whole."""
    if plan.mesh.shape["tensor"] == 1:
        return run
    own = lambda spec: automatic_part(partition(spec, plan.mesh.shape), MANUAL_AXES)
    specs = jax.tree.map(own, plan.specs)
    return jax.shard_map(run, in_specs=(specs,), out_specs=specs, axis_names={"tensor"}, check_vma=False)
