"""One rank's run through a tick table.

A `lax.scan` over ticks. In a tick, in this order: (1) the input gradients of the last tick travel; (2) F slot: a chunk's
input comes from the inbox or the embedding, its layers run, what B and W need is stashed; (3) the output travels;
(4) vocabulary slot: if a microbatch left the last chunk, all ranks of the pipe compute its loss together, each for its part
of the vocabulary; (5) B slot; (6) W slot. A rank fills each slot at most once a tick, with different microbatches; the table
says with which, and where everything waits (schedule/slots.py).

Idle slots. skip: `lax.cond` around a slot; one scan holds all three slots and the table is an argument of the compiled step.
compute: no conditionals, idle slots compute on what lies in the waste bin and nothing reads it; runs of ticks with the same
slots are phases, each a scan of its own. The joint work of the vocabulary is a `cond` in both, taken by all ranks together.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel import vocabulary
from parallel.axes import MANUAL_AXES
from parallel.schedule.slots import CLASSES, JOINT_FIELDS, RANK_FIELDS
from parallel.sharding import automatic_part, partition
from parallel.split import Split, split

Tree = Any


def _at(tree: Tree, *indices: jax.Array) -> Tree:
    """tree[i], tree[i, j], ...: a dimension of size 1 is indexed statically, so that no copy is made."""
    for i in indices:
        tree = jax.tree.map(lambda a, i=i: a[0] if len(a) == 1 else lax.dynamic_index_in_dim(a, i, 0, keepdims=False), tree)
    return tree


def _put(tree: Tree, new: Tree, i: jax.Array) -> Tree:
    return jax.tree.map(lambda a, n: lax.dynamic_update_index_in_dim(a, n, i, 0), tree, new)


def _choose(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


class Executor:
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
            return first, jax.tree.map(lambda g, d: g + d if len(g) == 1 else g.at[c].add(d.astype(g.dtype)), grads, dw)

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
            slots = [
                (arrive, self._receive),
                (f, self._f_slot),
                (b, self._b_slot),
                (w and not self.fused, self._w_slot),
            ]

            def tick(s, row, slots=slots):
                k = {
                    **{n: row[0][i] for i, n in enumerate(RANK_FIELDS)},
                    **{n: row[1][i] for i, n in enumerate(JOINT_FIELDS)},
                }
                for held, slot in slots:
                    s = slot(k, dict(s)) if held else s
                return s, None

            s, _ = lax.scan(tick, s, (ranks[start:stop], joint[start:stop]))
        s["layer_sums"] = jax.tree.map(vocabulary.total, s["layer_sums"])
        return s
