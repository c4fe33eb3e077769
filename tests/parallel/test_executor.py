"""The executor on a toy model with everything that its interface allows: a carry of two arrays, auxiliary sums with seeds,
state per chunk and per (chunk, microbatch). Compared with plain jax.grad, and every action counted.

Unwritten buffers and skipped slots hold NaN in all runs here, so whatever reads them shows.

How actions are counted, exactly and by layer and microbatch (the digits of a number to the base 8):
F  `tag` grows by 8^layer on its way through the model, and `calls` in the state by 1.
B  the gradient of `tag` grows by 8^layer on its way back, and embed_backward adds it to what it keeps for its microbatch.
W  the sum `runs` is count * 8^microbatch in each layer, so that is what a W adds to the gradient of a layer's `count`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from parallel import pipeline, schedule, vocabulary
from parallel.mesh import make_mesh
from parallel.schedule.slots import lower
from parallel.sharding import ParamSpec, make_layout, memory_shape
from tests.parallel.by_hand import v_table

D, VOCAB, LAYERS, ROWS = 4, 11, 7, 4
SEEDS = dict(aux=np.float32(0.3), runs=np.float32(1))


# ----------------------------------------------------------------------------------------------- the toy
@jax.custom_vjp
def mark(tag, amount):
    """Adds `amount` to the tag on the way and to its gradient on the way back."""
    return tag + amount


mark.defvjp(lambda tag, amount: (tag + amount, amount), lambda amount, d: (d + amount, jnp.zeros(())))


class Toy:
    """x grows by layers, is scored by squares; `tag` counts. See parallel.pipeline.Model for what each does."""

    def layer(self, w, ctx, state, carry):
        index, side = ctx
        h = jnp.sin(checkpoint_name(carry["x"] @ w["w"] + w["b"], "h")) * state["gain"]
        tag = mark(carry["tag"], 8.0 ** index.astype(jnp.float32))
        sums = dict(aux=(h**2 * side["weights"][:, None]).sum(), runs=w["count"][0] * 8.0 ** side["id"][0])
        return dict(x=carry["x"] + h, tag=tag), dict(gain=after(state["gain"]), calls=state["calls"] + 1), sums

    def embed(self, shared, side):
        x = vocabulary.lookup(shared["embed"]["table"], side["tokens"])
        return dict(x=x, tag=jnp.zeros(x.shape[:1]))

    def embed_backward(self, shared, side, dcarry, grads):
        own = grads["embed"]
        marks = own["marks"].at[side["id"][0].astype(int)].add(dcarry["tag"].sum())
        return dict(grads, embed=dict(table=vocabulary.add_rows(own["table"], side["tokens"], dcarry["x"]), marks=marks))

    def head(self, shared, carry, side, scale, grads):
        loss = lambda out, x: scale * (side["weights"] * (x @ out - side["targets"]) ** 2).sum()
        value, (dout, dx) = jax.value_and_grad(loss, (0, 1))(shared["head"]["out"], carry["x"])
        passed = grads["head"]["passed"].at[side["id"][0].astype(int)].add(carry["tag"].sum())
        grads = dict(grads, head=dict(out=grads["head"]["out"] + dout, passed=passed))
        return dict(loss=value), dict(x=dx, tag=jnp.zeros_like(carry["tag"])), grads


def after(gain):
    """What a forward makes of its state."""
    return 0.5 * gain + 0.4


def specs(microbatches):
    spec = lambda shape, axes=None, **more: ParamSpec(shape, axes or (None,) * len(shape), None, "matrix", **more)
    return dict(
        layers={n: spec(s, stacked=True) for n, s in dict(w=(D, D), b=(D,), count=(1,)).items()},
        embed=dict(table=spec((VOCAB, D), ("vocab", None)), marks=spec((microbatches,))),
        head=dict(out=spec((D,)), passed=spec((microbatches,))),
    )


def side_of(m):
    r, shape = np.random.default_rng(m), (m, ROWS)
    side = dict(tokens=r.integers(0, VOCAB, shape), targets=r.normal(size=shape), weights=r.random(shape))
    side["id"] = np.broadcast_to(np.arange(m)[:, None], shape)
    return {n: a.astype(np.int32 if n == "tokens" else np.float32) for n, a in side.items()}


# ----------------------------------------------------------------------------------------------- the plain computation
@functools.cache
def plain(m, layers, per_microbatch):
    """(sums, grads, outputs, gain at the end) of the toy by a loop over microbatches and layers, and jax.grad."""
    params = random_params(m, layers)
    side, start = side_of(m), gains(layers, m, per_microbatch)

    def run(params):
        total, sums, ys, gain = 0.0, dict(loss=0.0, aux=0.0), [], [list(g) for g in start]
        for i in range(m):
            one = {n: a[i] for n, a in side.items()}
            x = params["embed"]["table"][one["tokens"]]
            for k in range(layers):
                w, j = jax.tree.map(lambda a, k=k: a[k], params["layers"]), i * per_microbatch
                h = jnp.sin(x @ w["w"] + w["b"]) * gain[k][j]
                gain[k][j] = after(gain[k][j])
                sums["aux"] += (h**2 * one["weights"][:, None]).sum()
                x = x + h
            ys.append(x @ params["head"]["out"])
            sums["loss"] += (one["weights"] * (ys[-1] - one["targets"]) ** 2).sum() / side["weights"].sum()
        total = sums["loss"] + SEEDS["aux"] * sums["aux"]
        return total, (sums, jnp.stack(ys), np.array(gain, np.float32))

    grads, (sums, ys, gain) = jax.jit(jax.grad(run, has_aux=True))(params)
    return params, sums, grads, ys, gain


def gains(layers, m, per_microbatch):
    """State at the start of each layer, [layers, microbatches or 1]."""
    r = np.random.default_rng(3)
    return r.uniform(0.5, 1.5, (layers, m if per_microbatch else 1)).astype(np.float32)


# ----------------------------------------------------------------------------------------------- running
def random_params(m, layers):
    """Canonical parameters: layers in order, vocabulary unpadded."""
    r = np.random.default_rng(0)
    shape = lambda spec: (layers, *spec.shape) if spec.stacked else spec.shape
    return jax.tree.map(lambda spec: (0.3 * r.normal(size=shape(spec))).astype(np.float32), specs(m))


def place(plan, tree):
    """Canonical parameters as the plan has them in memory."""

    def one(spec, sharding, a):
        if spec.stacked:
            index = plan.layout.index_CPL
            a = np.where((index >= 0).reshape(*index.shape, *[1] * (a.ndim - 1)), a[index], 0)
        shape = memory_shape(spec, plan.layout, plan.mesh.shape)
        a = np.pad(a, [(0, n - k) for n, k in zip(shape, a.shape)])
        return jax.device_put(a, NamedSharding(plan.mesh, sharding))

    return jax.tree.map(one, plan.specs, plan.param_specs(), tree)


def plan_for(table, sizes, per_chunk=(), layers=LAYERS, **options):
    mesh = make_mesh(dict(sizes, pipe=table.stages))
    layout = make_layout(layers, table.placement, table.stages, table.chunks, per_chunk)
    options = dict(seeds=SEEDS, poison=True) | options
    return pipeline.make_plan(mesh, layout, specs(table.microbatches), schedule.pack(table), **options)


def state_of(plan, m):
    index = plan.layout.index_CPL
    gain = gains(plan.layout.layers, m, plan.state_per_microbatch)[index]  # [C, P, slots, microbatches or 1]
    gain = np.moveaxis(gain, 3, 2) if plan.state_per_microbatch else gain[..., 0]
    return dict(gain=gain, calls=np.zeros(gain.shape, np.int32))


def canonical_state(plan, a):
    """[layers, microbatches or 1] of a state array."""
    a, index = np.asarray(a), plan.layout.index_CPL
    a = np.moveaxis(a, 2, 3) if plan.state_per_microbatch else a[..., None]
    out = np.zeros((plan.layout.layers, a.shape[-1]), a.dtype)
    out[index[index >= 0]] = a[index >= 0]
    return out


def gradients(plan, m):
    """A function of a table that runs the compiled step of the plan."""
    params = place(plan, plain(m, plan.layout.layers, plan.state_per_microbatch)[0])
    step = jax.jit(pipeline.gradients(Toy(), plan, lambda side: side["weights"].sum()))

    def run(table):
        with jax.set_mesh(plan.mesh):
            return step(params, state_of(plan, m), side_of(m), table)

    return run


def check(plan, m, sums, grads, state):
    layers, mesh = plan.layout.layers, plan.mesh.shape
    shards = mesh["replica"] * mesh["data"]
    _, want_sums, want, _, gain = plain(m, layers, plan.state_per_microbatch)
    grads = reference.canonical(plan, grads)
    once = sum(8**k for k in range(layers))
    # F, B and W of every layer and microbatch, each once: exact numbers
    np.testing.assert_array_equal(grads["head"]["passed"], np.full(m, ROWS * once))
    np.testing.assert_array_equal(grads["embed"]["marks"], np.full(m, ROWS * once))
    np.testing.assert_array_equal(grads["layers"]["count"], np.full((layers, 1), shards * sum(8**i for i in range(m))))
    calls = canonical_state(plan, state["calls"])
    np.testing.assert_array_equal(calls, np.full(calls.shape, 1 if plan.state_per_microbatch else m))
    assert calls.sum() == np.asarray(state["calls"]).sum(), "an empty slot ran"
    # values
    np.testing.assert_allclose(canonical_state(plan, state["gain"]), gain, rtol=1e-6)
    for name, value in want_sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    for part, name in (("layers", "w"), ("layers", "b"), ("embed", "table"), ("head", "out")):
        a = np.asarray(want[part][name])
        np.testing.assert_allclose(grads[part][name], a, rtol=1e-5, atol=2e-6 * np.abs(a).max(), err_msg=name)


CASES = {
    "interleaved-skip-fused": (schedule.make("interleaved", 2, 5, 2, backward="whole"), {}, dict(remat=None)),
    "interleaved-skip-split": (schedule.make("interleaved", 2, 5, 2, backward="split"), {}, dict(remat=("h",))),
    "interleaved-compute-fused": (
        schedule.make("interleaved", 2, 3, 2, backward="whole"),
        dict(replica=2),
        dict(remat=("h",), state_per_microbatch=True),
    ),
    "interleaved-compute-split": (schedule.make("interleaved", 3, 5, 2, 4, backward="split"), {}, dict(remat=None)),
    "1f1b-compute-split-few-microbatches": (
        schedule.make("1f1b", 4, 3, backward="split"),
        dict(data=2),
        dict(zero=1, state_per_microbatch=True, unroll=True),
    ),
    "v-skip-split": (v_table(3, 3, "split"), {}, dict(state_per_microbatch=True)),
    "v-compute-fused": (v_table(2, 5, "whole"), dict(data=2), dict(remat=None)),
    "no-pipeline": (schedule.make("gpipe", 1, 5, backward="whole"), {}, {}),
    "eager-compute-split-empty-stages": (
        schedule.make("eager-1f1b", 4, 4, backward="split"),
        {},
        dict(layers=2, per_chunk=(1, 0, 0, 1)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_jax_grad_and_every_action_runs_once(name):
    table, sizes, options = CASES[name]
    plan = plan_for(table, sizes, **(dict(idle="compute" if "compute" in name else "skip") | options))
    assert plan.ticks.fused == ("split" not in name)
    check(plan, table.microbatches, *gradients(plan, table.microbatches)(plan.table))


def test_in_skip_mode_one_program_runs_many_schedules():
    """The table is an argument: rows padded to the same ticks, slots and ways run in the program compiled for others,
    whether a tick holds a pair or a single action."""
    p, m = 4, 5
    tables = [schedule.make(name, p, m, backward="split") for name in ("1f1b", "gpipe", "eager-1f1b")]
    rows = [lower(schedule.pack(table)) for table in tables] + [lower(schedule.pack(tables[0], "single"))]
    widest = {name: max(r.slots[name] for r in rows) for name in rows[0].slots}
    ways = {name: tuple(dict.fromkeys(way for r in rows for way in r.moves[name])) for name in rows[0].moves}
    rows = [r.padded(max(len(r.ranks) for r in rows), widest, ways) for r in rows]
    plan = dataclasses.replace(plan_for(tables[0], {}), rows=rows[0])
    run = gradients(plan, m)
    for r in rows:
        check(plan, m, *run(dict(ranks=r.ranks, joint=r.joint)))


@pytest.mark.parametrize(
    ("placement", "p", "v", "idle"), [("linear", 4, 1, "compute"), ("loop", 2, 2, "skip"), ("v", 3, 2, "skip")]
)
def test_forward_only_outputs_come_in_the_order_of_microbatches(placement, p, v, idle):
    m, sizes = 5, dict(data=2) if p == 2 else {}
    plan = plan_for(schedule.make_forward(placement, p, m, v), sizes, idle=idle)
    params, _, _, ys, gain = plain(m, LAYERS, False)

    def predict(shared, carry, side):
        return dict(y=carry["x"] @ shared["head"]["out"], tag=carry["tag"], id=side["id"])

    with jax.set_mesh(plan.mesh):
        out, state = jax.jit(pipeline.outputs(Toy(), plan, predict))(
            place(plan, params), state_of(plan, m), side_of(m), plan.table
        )
    np.testing.assert_array_equal(out["id"], side_of(m)["id"])
    np.testing.assert_array_equal(out["tag"], np.full((m, ROWS), sum(8**k for k in range(LAYERS))))
    np.testing.assert_allclose(out["y"], ys, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(canonical_state(plan, state["calls"]), np.full((LAYERS, 1), m))
    np.testing.assert_allclose(canonical_state(plan, state["gain"]), gain, rtol=1e-6)
