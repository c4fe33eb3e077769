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
    """tree[i], tree[i, j], ... as one slice, so that nothing is copied but what is read."""

    def one(a):
        n = len(indices)
        start = [0 if size == 1 else i for i, size in zip(indices, a.shape)]
        if all(isinstance(i, int) for i in start):
            return a[tuple(start)]
        return lax.dynamic_slice(a, [*start, *(0,) * (a.ndim - n)], (*(1,) * n, *a.shape[n:])).reshape(a.shape[n:])

    return jax.tree.map(one, tree)


def _put(tree: Tree, new: Tree, *indices: jax.Array) -> Tree:
    """The tree with new at [i], [i, j], ..., in place."""

    def one(a, x):
        n = len(indices)
        return lax.dynamic_update_slice(a, x.reshape(*(1,) * n, *x.shape), [*indices, *(0,) * x.ndim])

    return jax.tree.map(one, tree, new)


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
        self.guarded = not plan.layout.full
        self.carry = jax.eval_shape(model.embed, self.shared, self._side(0))

    # ------------------------------------------------------------------------------------------- small pieces
    def _side(self, m):
        return _at(self.side, m)

    def _blank(self, tree, lead=()):
        fill = jnp.nan if self.plan.poison else 0
        value = lambda s: jnp.full((*lead, *s.shape), fill if jnp.issubdtype(s.dtype, jnp.inexact) else 0, s.dtype)
        return jax.tree.map(value, tree)

    def _slot(self, busy, run, idle, into):
        """run(into) or, in a skipped slot, idle(into): as `into` is written in place, what it holds is kept."""
        return lax.cond(busy > 0, run, idle, into) if self.skip and not self.plan.apart else run(into)

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

        def one(spec, g):
            auto = automatic_part(partition(spec, self.plan.mesh.shape), MANUAL_AXES)
            return lax.with_sharding_constraint(g, P(auto[0], *auto[2:]) if spec.stacked else auto)  # without `pipe`

        return jax.tree.map(one, self.plan.specs, tree)

    # ------------------------------------------------------------------------------------------- chunks
    def _cut(self, state) -> Split:
        layer, keep = self.model.layer, self.plan.remat
        if keep is not None:
            layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*keep))
        one = jax.tree.map(lambda a: a[0, 0], self.layers)
        lead = 4 if self.plan.state_per_microbatch else 3
        state = jax.tree.map(lambda a: a[(0,) * lead], state)
        ctx = (jnp.zeros((), jnp.int32), self._side(0))
        return split(layer, one, ctx, state, self.carry, self.plan.seeds, fused=self.fused)

    # Layers, states, residuals and gradients are read and written one layer at a time, where they lie: no chunk is ever copied.
    def _f_chunk(self, k, x, stash, states):
        """(y, stash, states, sums) of the F slot's chunk."""
        side, slots = self._side(k["F_m"]), {name: k[f"F_{name}"] for name in stash}
        where = (k["F_c"], 0, k["F_m"]) if self.plan.state_per_microbatch else (k["F_c"], 0)  # the 0 is this rank of the pipe

        if self.plan.apart:
            every = []
            for layer, index, state in zip(_at(self.layers, 0, 0), self.index_CL[0], states):
                x, *rest = self.model.layer(layer, (index, side), state, x)
                every.append(rest)
            states, sums = zip(*every)
            return x, stash, states, jax.tree.map(lambda *s: sum(s), *sums)

        def body(carry, i):
            x, stash, states = carry
            w, index = _at((self.layers, self.index_CL), k["F_c"], i)
            state = _at(states, *where, i)
            if self.train:
                run = lambda: self.cut.forward(w, (index, side), state, x)
            else:
                run = lambda: (*self.model.layer(w, (index, side), state, x), [], [])
            y, new, sums, a, aw = self._layer(index, run, x, state)
            made = dict(a=a, aw=aw)
            stash = {name: _put(all_, made[name], slots[name], i) for name, all_ in stash.items()}
            new = new if self.skip else _choose(k["F_busy"] > 0, new, state)
            return (y, stash, _put(states, new, *where, i)), sums

        (y, stash, states), sums = self._loop(body, (x, stash, states), jnp.arange(self.plan.layout.slots))
        return y, stash, states, jax.tree.map(lambda s: s.sum(0), sums)

    def _b_chunk(self, k, s, into):
        """(dx, into) of the B slot's chunk; into: what B hands to W, or when fused the gradients of all layers."""
        side = self._side(k["B_m"])

        def body(carry, i):
            dy, into = carry
            w, index = _at((self.layers, self.index_CL), k["B_c"], i)
            a, aw = _at(s["a"], k["B_a"], i), _at(s["aw"], k["B_aw"], i)
            run = lambda: self.cut.backward(w, (index, side), self.plan.seeds, a, aw, dy)
            dx, made = self._layer(index, run, dy)
            return (dx, self._add(k, "B", into, made, i) if self.fused else _put(into, made, k["B_cut"], i)), None

        return self._loop(body, (_at(s["g"], k["B_g"]), into), jnp.arange(self.plan.layout.slots), reverse=True)[0]

    def _w_chunk(self, k, s, grads):
        """grads with those of the W slot's chunk added."""
        side = self._side(k["W_m"])

        def body(grads, i):
            w, index = _at((self.layers, self.index_CL), k["W_c"], i)
            aw, cut = _at(s["aw"], k["W_aw"], i), _at(s["cut"], k["W_cut"], i)
            dw = self._layer(index, lambda: (self.cut.weights(w, (index, side), self.plan.seeds, aw, cut),))[0]
            return self._add(k, "W", grads, dw, i), None

        return self._loop(body, grads, jnp.arange(self.plan.layout.slots))[0]

    def _add(self, k, kind, grads, dw, i):
        """grads with dw added to layer slot i of the chunk; what an idle slot computed in vain is not added."""
        if not self.skip:
            dw = jax.tree.map(lambda d: jnp.where(k[f"{kind}_busy"] > 0, d, 0), dw)
        where = k[f"{kind}_c"], i
        return jax.tree.map(lambda g, d: g.at[where].add(d.astype(g.dtype), mode="promise_in_bounds"), grads, dw)

    # ------------------------------------------------------------------------------------------- slots
    def _receive(self, k, s):
        for way in self.rows.moves["g"]:
            s["g"] = _put(s["g"], self._permute(s["dx"], way), k[f"g_{way}"])
        return s

    def _f_slot(self, k, s):
        busy = k["F_busy"]
        embed = lambda: jax.tree.map(vocabulary.total, self.model.embed(self.shared, self._side(k["enter"])))
        with jax.named_scope("enter"):
            entering = lax.cond(k["enter"] >= 0, embed, lambda: self._blank(self.carry))
        x = _choose(k["F_first"] > 0, entering, _at(s["x"], k["F_x"]))
        into = {name: s[name] for name in ("a", "aw") if self.train}, s["state"]
        idle = lambda into: (self._blank(self.carry), *into, self._blank(s["layer_sums"]))
        y, stash, s["state"], sums = self._slot(busy, lambda into: self._f_chunk(k, x, *into), idle, into)
        s["layer_sums"] = jax.tree.map(lambda t, one: t + jnp.where(busy > 0, one, 0), s["layer_sums"], sums)
        for way in self.rows.moves["x"]:
            s["x"] = _put(s["x"], self._permute(y, way), k[f"x_{way}"])
        leave = k["leave"]
        last = lambda: jax.tree.map(lambda y: vocabulary.from_rank(y, self.rows.last_rank), y)
        if not self.train:
            write = lambda out: _put(out, self.predict(self.shared, last(), self._side(leave)), leave)
            return dict(s, out=lax.cond(leave >= 0, write, lambda out: out, s["out"]))
        s |= stash

        def head(g_shared):
            sums, dy, g_shared = self.model.head(self.shared, last(), self._side(leave), self.scale, g_shared)
            return jax.tree.map(jnp.add, s["sums"], sums), dy, g_shared

        nothing = lambda g_shared: (s["sums"], self._blank(self.carry), g_shared)
        with jax.named_scope("leave"):
            s["sums"], dy, s["g_shared"] = lax.cond(leave >= 0, head, nothing, s["g_shared"])
        return dict(s, g=_put(s["g"], dy, k["head_g"]))

    def _b_slot(self, k, s):
        into = "g_layers" if self.fused else "cut"
        run = lambda into: self._b_chunk(k, s, into)
        s["dx"], s[into] = self._slot(k["B_busy"], run, lambda into: (self._blank(self.carry), into), s[into])

        def leave(g_shared):
            dx = jax.tree.map(lambda d: vocabulary.from_rank(d, self.rows.first_rank), s["dx"])
            return self.model.embed_backward(self.shared, self._side(k["exit"]), dx, g_shared)

        with jax.named_scope("exit"):
            return dict(s, g_shared=lax.cond(k["exit"] >= 0, leave, lambda g: g, s["g_shared"]))

    def _w_slot(self, k, s):
        grads = self._slot(k["W_busy"], lambda grads: self._w_chunk(k, s, grads), lambda grads: grads, s["g_layers"])
        return dict(s, g_layers=grads)

    # ------------------------------------------------------------------------------------------- the run
    def _initial(self, state):
        size = lambda name: (self.rows.slots[name] + 1,)  # the last slot is the waste bin
        s = dict(x=self._blank(self.carry, size("x")), state=state)
        k = dict.fromkeys(RANK_FIELDS, 0)
        sums = jax.eval_shape(lambda: self._f_chunk(k, self._blank(self.carry), {}, state)[3])
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

    def _stamp(self, s, tick):
        """Tells the host that this rank has computed everything of a tick: one number of each result is asked for."""
        some = [a[(0,) * a.ndim].astype(jnp.float32) for a in jax.tree.leaves(s)]
        jax.debug.callback(self.plan.stamp, lax.axis_index("pipe"), tick, sum(some), ordered=False)

    def run(self, state, table):
        """All ticks; returns what the scan carried at the end, gradients not yet summed over the batch axes."""
        ranks, joint = table["ranks"][:, 0], table["joint"]
        if self.train:
            self.cut = self._cut(state)
        s = self._initial(state)
        whole = [(0, len(ranks), (True, self.train, self.train and not self.fused))]
        for start, stop, (f, b, w) in whole if self.skip else self.plan.ticks.phases():
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
                    with jax.named_scope(slot.__name__.strip("_")):  # what profiles and the compiled program call it
                        s = slot(k, dict(s)) if held else s
                if self.plan.stamp is not None:
                    self._stamp(s, row[2])
                return s, None

            s, _ = lax.scan(tick, s, (ranks[start:stop], joint[start:stop], jnp.arange(start, stop)))
        s["layer_sums"] = jax.tree.map(vocabulary.total, s["layer_sums"])
        return s
