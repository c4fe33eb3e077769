"""Cuts one layer into three programs: F (forward), B (input gradient) and W (parameter gradients).

Nothing is computed twice and no parameter is stashed: the layer's forward and backward are traced once as jaxprs, and each
equation goes to the program that needs it. Two facts about JAX carry this, and tests guard both: the function that
`jax.vjp` returns is a pytree whose leaves are the residuals, in the same order whenever the same function is traced; and
equations can be bound again (`jax.extend.core`, as in JAX's own tutorial on custom interpreters).

What the cut cannot look inside stays whole on the B side: `scan`, `cond` and a nested `shard_map`. So no parameter may be
used in one (its gradient would not move to W and its value would be stashed): cut one layer, put `cond` and loops around
the programs, and give a kernel's nested `shard_map` activations only. Custom VJPs, `jit` and `checkpoint` are entered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
)
"""Primitives that only call a jaxpr, by their names in jax 0.10 to 0.12."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The programs of one layer and the residuals that pass between them (lists of ShapeDtypeStruct).

    forward(w, ctx, state, x) -> (y, state, sums, a, aw)
    backward(w, ctx, seeds, a, aw, dy) -> (dx, cut); when fused, (dx, dw)
    weights(w, ctx, seeds, aw, cut) -> dw; when fused, None
    a: what only B reads; aw: what W reads (too); cut: what B hands to W. matmuls: dot products in F, B and W."""

    forward: Callable
    backward: Callable
    weights: Callable | None
    a: list[jax.ShapeDtypeStruct]
    aw: list[jax.ShapeDtypeStruct]
    cut: list[jax.ShapeDtypeStruct]
    matmuls: tuple[int, int, int]


def split(layer: Callable, w: Any, ctx: Any, state: Any, x: Any, seeds: Any, fused: bool = False) -> Split:
    """Cuts `layer(w, ctx, state, x) -> (y, state, sums)` at the given example arguments (arrays or shapes).

    w: parameters. ctx: whatever else the layer reads that is at hand again in the backward (microbatch data, keys, layer
    index). state: not differentiated, and gone by the time of the backward. seeds: the cotangents of `sums`.
    What depends on w and ctx only (casts, masks, dropout) is computed again in B and W instead of being stashed.
    fused: B and W are one program, `aw` and `cut` are empty."""

    def primal(w, ctx, state, x):
        def differentiated(w, x):
            y, new_state, sums = layer(w, ctx, state, x)
            return (y, sums), new_state

        return jax.vjp(differentiated, w, x, has_aux=True)

    def forward(w, ctx, state, x):
        (y, sums), pull, new_state = primal(w, ctx, state, x)
        return (y, new_state, sums), jax.tree.leaves(pull)

    count = lambda *trees: len(jax.tree.leaves(trees))
    f_jaxpr, (f_out, _) = flat_jaxpr(forward, w, ctx, state, x)
    results, leaves = f_jaxpr.jaxpr.outvars[: count(f_out)], f_jaxpr.jaxpr.outvars[count(f_out) :]
    active = _depending(f_jaxpr.jaxpr.eqns, f_jaxpr.jaxpr.invars[count(w, ctx) :])
    kept = [v for v in dict.fromkeys(_variables(leaves)) if v in active]  # each once

    def backward(w, ctx, seeds, values, dy):
        # Of this second trace only what w and ctx alone give survives `_needed`; the rest is replaced by the residuals.
        _, pull, _ = primal(w, ctx, *jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (state, x)))
        own, tree = jax.tree.flatten(pull)
        given = {id(v): value for v, value in zip(kept, values)}
        dw, dx = jax.tree.unflatten(tree, [given.get(id(v), mine) for v, mine in zip(leaves, own)])((dy, seeds))
        return dx, dw

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept]
    b_jaxpr, _ = flat_jaxpr(backward, w, ctx, seeds, shapes, x)
    eqns, ins, outs = b_jaxpr.jaxpr.eqns, b_jaxpr.jaxpr.invars, b_jaxpr.jaxpr.outvars
    n_free, n_x = count(w, ctx, seeds), count(x)
    free, values, d_ins = ins[:n_free], ins[n_free : n_free + len(kept)], ins[n_free + len(kept) :]
    dx, dw = outs[:n_x], outs[n_x:]

    fixed = _depending(eqns, ins[n_free:])  # all else depends on w and ctx only: either side may compute it
    b_eqns = _needed(eqns, outs if fused else dx)
    in_b = {id(e) for e in b_eqns if fixed.intersection(e.outvars)}
    w_eqns = [] if fused else _needed([e for e in eqns if id(e) not in in_b], dw)
    made = {o for e in w_eqns for o in e.outvars}
    read = [] if fused else _variables([*(v for e in w_eqns for v in e.invars), *dw])
    crossing = dict.fromkeys(v for v in read if v in fixed and v not in made)
    order = sorted(range(len(kept)), key=lambda i: values[i] in crossing)  # a, then aw
    n_a = sum(v not in crossing for v in values)
    ordered = [values[i] for i in order]
    cut = [v for v in crossing if v not in values]

    f_outs = [*results, *(kept[i] for i in order)]
    f_call = _program(f_jaxpr, _needed(f_jaxpr.jaxpr.eqns, f_outs), f_jaxpr.jaxpr.invars, f_outs)
    b_call = _program(b_jaxpr, b_eqns, [*free, *ordered, *d_ins], outs if fused else [*dx, *cut])
    w_call = _program(b_jaxpr, w_eqns, [*free, *ordered[n_a:], *cut], dw)
    flat = jax.tree.leaves
    w_tree, x_tree, f_tree = jax.tree.structure(w), jax.tree.structure(x), jax.tree.structure(f_out)

    def run_forward(w, ctx, state, x):
        out = f_call(*flat((w, ctx, state, x)))
        n = len(results)
        return *jax.tree.unflatten(f_tree, out[:n]), out[n : n + n_a], out[n + n_a :]

    def run_backward(w, ctx, seeds, a, aw, dy):
        out = b_call(*flat((w, ctx, seeds)), *a, *aw, *flat(dy))
        dx, rest = jax.tree.unflatten(x_tree, out[:n_x]), out[n_x:]
        return dx, jax.tree.unflatten(w_tree, rest) if fused else rest

    def run_weights(w, ctx, seeds, aw, cut):
        return jax.tree.unflatten(w_tree, w_call(*flat((w, ctx, seeds)), *aw, *cut))

    struct = lambda vs: [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in vs]
    return Split(
        forward=run_forward,
        backward=run_backward,
        weights=None if fused else run_weights,
        a=struct(ordered[:n_a]),
        aw=struct(ordered[n_a:]),
        cut=struct(cut),
        matmuls=tuple(_matmuls(call) for call in (f_call.eqns, b_call.eqns, w_call.eqns)),
    )


def flat_jaxpr(function: Callable, *args: Any) -> tuple[core.ClosedJaxpr, Any]:
    """The jaxpr of `function` with every call inlined, and the tree of its output shapes."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    call = _program(closed, closed.jaxpr.eqns, closed.jaxpr.invars, closed.jaxpr.outvars)
    return jax.make_jaxpr(call)(*jax.tree.leaves(args)), out


def count_matmuls(function: Callable, *args: Any) -> int:
    """Dot products that one evaluation of `function` asks for (loops and branches counted once), after dead code is cut."""
    closed, _ = flat_jaxpr(function, *args)
    return _matmuls(_needed(closed.jaxpr.eqns, closed.jaxpr.outvars))


def _matmuls(eqns: Sequence) -> int:
    return sum(e.primitive.name == "dot_general" for e in eqns)


def _program(closed: core.ClosedJaxpr, eqns: Sequence, ins: Sequence, outs: Sequence) -> Callable:
    """A function of `ins` that evaluates `eqns` and returns `outs`, entering calls (so that a retrace is flat)."""

    def call(*args):
        env = dict(zip([*closed.jaxpr.constvars, *ins], [*closed.consts, *args]))
        read = lambda atoms: [a.val if isinstance(a, core.Literal) else env[a] for a in atoms]
        for e in eqns:
            if e.primitive.name in CALLS:
                sub = e.params["jaxpr"] if "jaxpr" in e.params else e.params["call_jaxpr"]
                sub = sub if isinstance(sub, core.ClosedJaxpr) else core.ClosedJaxpr(sub, ())
                out = _program(sub, sub.jaxpr.eqns, sub.jaxpr.invars, sub.jaxpr.outvars)(*read(e.invars))
            else:
                out = e.primitive.bind(*read(e.invars), **e.primitive.get_bind_params(e.params))
                out = out if e.primitive.multiple_results else [out]
            env.update(zip(e.outvars, out))
        return read(outs)

    call.eqns = eqns
    return call


def _variables(atoms: Sequence) -> list:
    return [a for a in atoms if isinstance(a, core.Var)]


def _needed(eqns: Sequence, outs: Sequence) -> list:
    """The equations that `outs` depend on, in order."""
    live, kept = set(_variables(outs)), []
    for e in reversed(eqns):
        if live.intersection(e.outvars):
            kept.append(e)
            live.update(_variables(e.invars))
    return kept[::-1]


def _depending(eqns: Sequence, sources: Sequence) -> set:
    """The variables that depend on `sources`, and these."""
    found = set(sources)
    for e in eqns:
        if found.intersection(_variables(e.invars)):
            found.update(e.outvars)
    return found
