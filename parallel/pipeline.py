"""The executor: a tick table run by one XLA program, with gradients of loss by every parameter.

A `lax.scan` over ticks inside one shard_map that is manual over every axis but `tensor`. In a tick, in this order:
(1) the input gradients of the last tick travel; (2) F slot: a chunk's input comes from the inbox or the embedding, its layers
run, what B and W need is stashed; (3) the output travels; (4) vocabulary slot: if a microbatch left the last chunk, all ranks
of the pipe compute its loss together, each for its part of the vocabulary; (5) B slot; (6) W slot. A rank fills each slot at
most once a tick, with different microbatches; the table says with which, and where everything waits (schedule/slots.py).

Idle slots. skip: `lax.cond` around a slot; one scan holds all three slots and the table is an argument of the compiled step.
compute: no conditionals, idle slots compute on what lies in the waste bin and nothing reads it; runs of ticks with the same
slots are phases, each a scan of its own. The joint work of the vocabulary is a `cond` in both, taken by all ranks together.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallel import vocabulary
from parallel.axes import BATCH_AXES, MANUAL_AXES, SUM_AXES
from parallel.schedule.slots import CLASSES, JOINT_FIELDS, RANK_FIELDS, Rows, lower
from parallel.schedule.ticks import TickTable
from parallel.sharding import Layout, ParamSpec, automatic_part, manual_part, partition, with_axis, zero_dim
from parallel.split import Split, split

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
    unroll: the layers of a chunk one after another in the program (a GPU can then overlap them with permutes) or as a loop.
    poison: unwritten buffers and skipped slots hold NaN instead of zeros, for the test that nothing reads them."""

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
    poison: bool = False

    @property
    def table(self) -> dict[str, np.ndarray]:
        """The rows as arguments of the compiled step."""
        return dict(ranks=self.rows.ranks, joint=self.rows.joint)

    def param_specs(self) -> Tree:
        """How parameters and optimiser state are sharded in memory (ZeRO: also over `data`)."""
        return jax.tree.map(lambda s: with_axis(partition(s, self.layout, self.mesh.shape), self.zero_dim(s), "data"), self.specs)

    def zero_dim(self, spec: ParamSpec) -> int | None:
        """The dimension of a parameter in memory that ZeRO splits over `data`."""
        return zero_dim(spec, self.layout, self.mesh.shape, self.zero)

    def manual_specs(self) -> Tree:
        """What shard_map is told of the parameters."""
        return jax.tree.map(lambda spec: manual_part(spec, MANUAL_AXES), self.param_specs())


def make_plan(mesh: Mesh, layout: Layout, specs: Tree, ticks: TickTable, **options: Any) -> Plan:
    """A plan that runs `ticks` with its own rows."""
    return Plan(mesh, layout, specs, ticks, lower(ticks), **options)


SIDE = P(None, BATCH_AXES)  # leaves of side: [microbatches, rows, ...]
STATE = P(None, "pipe")  # leaves of state: [chunks, pipe, (microbatches,) slots, ...]


def gradients(model: Model, plan: Plan, denominator: Callable[[Tree], jax.Array]) -> Callable:
    """step(params, state, side, table) -> (sums, grads, state), to be called under jit and `jax.set_mesh(plan.mesh)`.

    side: leaves [M, rows, ...] of the global batch. The loss is the sum over all microbatches of `model.head`, divided by
    `denominator(side)` summed over the batch axes, known before the first tick. grads: fp32, like params, summed over the
    batch axes once per leaf, sharded like the optimiser state."""

    def run(params, state, side, index_CPL, table):
        scale = 1 / lax.psum(denominator(side), SUM_AXES)
        executor = _Executor(model, plan, _gathered(plan, params), side, index_CPL[:, 0], scale)
        end = executor.run(jax.tree.map(lambda a: a[:, 0], state), table)
        grads = dict(end["g_shared"], layers=jax.tree.map(lambda g: g[:, None], end["g_layers"]))
        sums = jax.tree.map(lambda s: lax.psum(s, SUM_AXES), {**end["sums"], **end["layer_sums"]})
        return sums, _reduced(plan, grads), jax.tree.map(lambda a: a[:, None], end["state"])

    specs = plan.manual_specs()
    return _manual(plan, run, (specs, STATE, SIDE), (P(), specs, STATE))


def outputs(model: Model, plan: Plan, predict: Callable[[Tree, Tree, Tree], Tree]) -> Callable:
    """step(params, state, side, table) -> (predict's outputs, state): the same executor on a forward-only table.

    predict(shared, carry, side) runs in the vocabulary slot, on all ranks together; its leaves [rows, ...] come back as
    [M, rows, ...]."""

    def run(params, state, side, index_CPL, table):
        executor = _Executor(model, plan, _gathered(plan, params), side, index_CPL[:, 0], None, predict)
        end = executor.run(jax.tree.map(lambda a: a[:, 0], state), table)
        return end["out"], jax.tree.map(lambda a: a[:, None], end["state"])

    return _manual(plan, run, (plan.manual_specs(), STATE, SIDE), (SIDE, STATE))


def _manual(plan: Plan, run: Callable, in_specs: tuple, out_specs: tuple) -> Callable:
    index_CPL = np.asarray(plan.layout.index_CPL, np.int32)
    table = dict(ranks=P(None, "pipe"), joint=P())
    mapped = jax.shard_map(
        run,
        mesh=plan.mesh,
        in_specs=(*in_specs, P(None, "pipe"), table),
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
    own = lambda spec: automatic_part(partition(spec, plan.layout, plan.mesh.shape), MANUAL_AXES)
    specs = jax.tree.map(own, plan.specs)
    return jax.shard_map(run, in_specs=(specs,), out_specs=specs, axis_names={"tensor"}, check_vma=False)


def _at(tree: Tree, *indices: jax.Array) -> Tree:
    """tree[i], tree[i, j], ...: a dimension of size 1 is indexed statically, so that no copy is made."""
    for i in indices:
        tree = jax.tree.map(lambda a, i=i: a[0] if len(a) == 1 else lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)
    return tree


def _put(tree: Tree, new: Tree, i: jax.Array) -> Tree:
    return jax.tree.map(lambda a, n: lax.dynamic_update_index_in_dim(a, n, i, 0), tree, new)


def _choose(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


class _Executor:
    """One rank's run through the table. `s` is what the scan carries, `k` a tick's row with fields by name."""

    def __init__(self, model, plan, params, side, index_CL, scale, predict=None):
        self.model, self.plan, self.side, self.scale, self.predict = model, plan, side, scale, predict
        self.layers = jax.tree.map(lambda a: a[:, 0], params["layers"])
        self.shared = {name: part for name, part in params.items() if name != "layers"}
        self.index_CL, self.rows = index_CL, plan.rows
        self.skip, self.train = plan.idle == "skip", predict is None
        self.fused = plan.ticks.fused and self.train
        self.guarded = not all(plan.layout.always)
        self.carry = jax.eval_shape(model.embed, self.shared, self._side(0))

    # ------------------------------------------------------------------------------------------- small pieces
    def _side(self, m):
        return _at(self.side, m)

    def _blank(self, tree, lead=()):
        fill = jnp.nan if self.plan.poison else 0
        value = lambda s: jnp.full((*lead, *s.shape), fill if jnp.issubdtype(s.dtype, jnp.inexact) else 0, s.dtype)
        return jax.tree.map(value, tree)

    def _slot(self, busy, run):
        """An F or B slot: skipped or computed in vain when idle; its outputs then are worth nothing."""
        return lax.cond(busy > 0, run, lambda: self._blank(jax.eval_shape(run))) if self.skip else run()

    def _layer(self, index, run, *hand_on):
        """A layer slot; an empty one gives `hand_on` for the first of run's outputs and zeros for the rest."""
        if not self.guarded:
            return run()
        zeros = lambda tree: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)
        empty = lambda: (*hand_on, *zeros(jax.eval_shape(run)[len(hand_on) :]))
        return lax.cond(index >= 0, run, empty) if self.skip else _choose(index >= 0, run(), empty())

    def _loop(self, body, init, xs, **how):
        return lax.scan(body, init, xs, unroll=self.plan.unroll, **how)

    def _permute(self, tree, way):
        n = self.plan.mesh.shape["pipe"]
        if way == "stay":
            return tree
        step = 1 if way == "right" else -1
        return lax.ppermute(tree, "pipe", [(i, (i + step) % n) for i in range(n)])

    def _constrain(self, tree):
        """Gradient accumulators keep their parameters' sharding over `tensor`."""
        if self.plan.mesh.shape["tensor"] == 1:
            return tree
        auto = lambda spec: automatic_part(partition(spec, self.plan.layout, self.plan.mesh.shape), MANUAL_AXES)
        drop = lambda spec, g: P(auto(spec)[0], *auto(spec)[2:]) if spec.stacked else auto(spec)
        specs = self.plan.specs
        like = dict({k: specs[k] for k in self.shared}, layers=specs["layers"])
        return jax.tree.map(lambda spec, g: lax.with_sharding_constraint(g, drop(spec, g)), like, tree)

    # ------------------------------------------------------------------------------------------- chunks
    def _cut(self, state) -> Split:
        layer, keep = self.model.layer, self.plan.remat
        if keep is not None:
            layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*keep))
        one = jax.tree.map(lambda a: a[0, 0], self.layers)
        lead = 3 if self.plan.state_per_microbatch else 2
        state = jax.tree.map(lambda a: a[(0,) * lead], state)
        ctx = (jnp.zeros((), jnp.int32), self._side(0))
        return split(layer, one, ctx, state, self.carry, self.plan.seeds, fused=self.fused)

    def _f_chunk(self, c, m, state, x):
        side = self._side(m)

        def body(x, xs):
            w, index, state = xs
            if self.train:
                run = lambda: self.cut.forward(w, (index, side), state, x)
            else:
                run = lambda: (*self.model.layer(w, (index, side), state, x), [], [])
            y, *rest = self._layer(index, run, x, state)
            return y, rest

        x, (state, sums, a, aw) = self._loop(body, x, (_at(self.layers, c), _at(self.index_CL, c), state))
        return x, state, jax.tree.map(lambda s: s.sum(0), sums), a, aw

    def _b_chunk(self, c, m, a, aw, dy):
        """dx of the chunk, and what B hands to W; when fused, the gradients of its layers."""
        side = self._side(m)

        def body(dy, xs):
            w, index, a, aw = xs
            run = lambda: self.cut.backward(w, (index, side), self.plan.seeds, a, aw, dy)
            return self._layer(index, run, dy)

        return self._loop(body, dy, (_at(self.layers, c), _at(self.index_CL, c), a, aw), reverse=True)

    def _w_chunk(self, c, m, aw, cut):
        side = self._side(m)

        def body(_, xs):
            w, index, aw, cut = xs
            return None, self._layer(index, lambda: (self.cut.weights(w, (index, side), self.plan.seeds, aw, cut),))[0]

        return self._loop(body, None, (_at(self.layers, c), _at(self.index_CL, c), aw, cut))[1]

    def _accumulate(self, busy, run, c, grads):
        """(run()'s first output, grads with its second added to chunk c); in place, and nothing is added when idle."""

        def add(grads):
            first, dw = run()
            if not self.skip:
                dw = jax.tree.map(lambda d: jnp.where(busy > 0, d, 0), dw)
            return first, jax.tree.map(lambda g, d: (g + d if len(g) == 1 else g.at[c].add(d.astype(g.dtype))), grads, dw)

        if not self.skip:
            return add(grads)
        return lax.cond(busy > 0, add, lambda grads: (self._blank(jax.eval_shape(lambda: run()[0])), grads), grads)

    # ------------------------------------------------------------------------------------------- slots
    def _receive(self, k, s):
        for way in self.rows.moves["g"]:
            s["g"] = _put(s["g"], self._permute(s["dx"], way), k[f"g_{way}"])
        return s

    def _f_slot(self, k, s):
        busy, c, m = k["F_busy"], k["F_c"], k["F_m"]
        embed = lambda: jax.tree.map(vocabulary.total, self.model.embed(self.shared, self._side(k["enter"])))
        entering = lax.cond(k["enter"] >= 0, embed, lambda: self._blank(self.carry))
        x = _choose(k["F_first"] > 0, entering, _at(s["x"], k["F_x"]))
        where = (c, m) if self.plan.state_per_microbatch else (c,)
        old = _at(s["state"], *where)
        y, state, sums, a, aw = self._slot(busy, lambda: self._f_chunk(c, m, old, x))
        state = _choose(busy > 0, state, old)
        s["state"] = jax.tree.map(lambda all_, one: all_.at[where].set(one), s["state"], state)
        s["layer_sums"] = jax.tree.map(lambda t, one: t + jnp.where(busy > 0, one, 0), s["layer_sums"], sums)
        for way in self.rows.moves["x"]:
            s["x"] = _put(s["x"], self._permute(y, way), k[f"x_{way}"])
        leave = k["leave"]
        last = lambda: jax.tree.map(lambda y: vocabulary.from_rank(y, self.rows.last_rank), y)
        if not self.train:
            write = lambda out: _put(out, self.predict(self.shared, last(), self._side(leave)), leave)
            return dict(s, out=lax.cond(leave >= 0, write, lambda out: out, s["out"]))
        s["a"], s["aw"] = _put(s["a"], a, k["F_a"]), _put(s["aw"], aw, k["F_aw"])

        def head(g_shared):
            sums, dy, g_shared = self.model.head(self.shared, last(), self._side(leave), self.scale, g_shared)
            return jax.tree.map(jnp.add, s["sums"], sums), dy, g_shared

        nothing = lambda g_shared: (s["sums"], self._blank(self.carry), g_shared)
        s["sums"], dy, s["g_shared"] = lax.cond(leave >= 0, head, nothing, s["g_shared"])
        return dict(s, g=_put(s["g"], dy, k["head_g"]))

    def _b_slot(self, k, s):
        busy, c, m = k["B_busy"], k["B_c"], k["B_m"]
        run = lambda: self._b_chunk(c, m, _at(s["a"], k["B_a"]), _at(s["aw"], k["B_aw"]), _at(s["g"], k["B_g"]))
        if self.fused:
            s["dx"], s["g_layers"] = self._accumulate(busy, run, c, s["g_layers"])
        else:
            s["dx"], cut = self._slot(busy, run)
            s["cut"] = _put(s["cut"], cut, k["B_cut"])

        def leave(g_shared):
            dx = jax.tree.map(lambda d: vocabulary.from_rank(d, self.rows.first_rank), s["dx"])
            return self.model.embed_backward(self.shared, self._side(k["exit"]), dx, g_shared)

        return dict(s, g_shared=lax.cond(k["exit"] >= 0, leave, lambda g: g, s["g_shared"]))

    def _w_slot(self, k, s):
        c, m = k["W_c"], k["W_m"]
        run = lambda: ((), self._w_chunk(c, m, _at(s["aw"], k["W_aw"]), _at(s["cut"], k["W_cut"])))
        return dict(s, g_layers=self._accumulate(k["W_busy"], run, c, s["g_layers"])[1])

    # ------------------------------------------------------------------------------------------- the run
    def _initial(self, state):
        size = lambda name: (self.rows.slots[name] + 1,)  # the last slot is the waste bin
        s = dict(x=self._blank(self.carry, size("x")), state=state)
        sums = jax.eval_shape(lambda: self._f_chunk(0, 0, self._first(state), self._blank(self.carry))[2])
        s["layer_sums"] = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), sums)
        if not self.train:
            out = jax.eval_shape(lambda: self.predict(self.shared, self._blank(self.carry), self._side(0)))
            n = len(jax.tree.leaves(self.side)[0])
            return dict(s, out=jax.tree.map(lambda o: jnp.zeros((n, *o.shape), o.dtype), out))
        s |= {name: self._blank(getattr(self.cut, name), (*size(name), self.plan.layout.slots)) for name in CLASSES[:3]}
        s |= dict(g=self._blank(self.carry, size("g")), dx=self._blank(self.carry))
        zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)
        grads = self._constrain(dict(zeros(self.shared), layers=zeros(self.layers)))
        s |= dict(g_layers=grads.pop("layers"), g_shared=grads)
        sums = jax.eval_shape(
            lambda: self.model.head(self.shared, self._blank(self.carry), self._side(0), self.scale, s["g_shared"])[0]
        )
        return dict(s, sums=jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), sums))

    def _first(self, state):
        return _at(state, *(0, 0)[: 1 + self.plan.state_per_microbatch])

    def run(self, state, table):
        """All ticks; returns what the scan carried at the end, gradients not yet summed over the batch axes."""
        ranks, joint = table["ranks"][:, 0], table["joint"]
        if self.train:
            self.cut = self._cut(state)
        s = self._initial(state)
        if self.skip:
            phases = [(0, len(ranks), (True, self.train, self.train and not self.fused))]
        else:
            phases = self.plan.ticks.phases()
        for start, stop, (f, b, w) in phases:
            arrivals = [RANK_FIELDS.index(f"g_{way}") for way in self.rows.moves["g"]]
            arrive = bool((self.rows.ranks[start:stop][..., arrivals] < self.rows.slots["g"]).any())
            slots = [(arrive, self._receive), (f, self._f_slot), (b, self._b_slot), (w and not self.fused, self._w_slot)]

            def tick(s, row, slots=slots):
                k = {**{n: row[0][i] for i, n in enumerate(RANK_FIELDS)}, **{n: row[1][i] for i, n in enumerate(JOINT_FIELDS)}}
                for held, slot in slots:
                    s = slot(k, dict(s)) if held else s
                return s, None

            s, _ = lax.scan(tick, s, (ranks[start:stop], joint[start:stop]))
        s["layer_sums"] = jax.tree.map(vocabulary.total, s["layer_sums"])
        return s
