"""Reading compiled programs: what communicates, over which axes, how often, how much."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel import hlo
from parallel.mesh import make_mesh

SIZES = dict(data=2, pipe=2, tensor=2)
TURNS = 5


@pytest.fixture(scope="module")
def traced():
    """A program with one collective of each kind that matters, at the top, in a loop, and in a branch of a loop."""
    mesh = make_mesh(SIZES)

    def run(x_NK, w_K):
        x = lax.psum(x_NK, "data")
        everyone = lax.all_gather(w_K, ("data", "tensor"), tiled=True)

        def turn(x, i):
            x = lax.ppermute(x, "pipe", [(0, 1), (1, 0)])
            x = lax.cond(i % 2 == 0, lambda x: lax.pmax(x, "tensor"), lambda x: x, x)
            return x, x.sum()

        x, sums = lax.scan(turn, x, jnp.arange(TURNS))
        return lax.psum_scatter(everyone, "pipe", tiled=True), x, sums.sum()[None]

    whole = P(("data", "pipe", "tensor"))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(whole, P("data")), out_specs=(whole, whole, whole), check_vma=False)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 3), (8,))]
    return mesh, jax.jit(mapped, donate_argnums=0).trace(*shapes)


@pytest.fixture(scope="module")
def compiled(traced):
    return traced[1].lower().compile()


def test_every_collective_with_axes_size_and_place(traced, compiled):
    mesh, _ = traced
    found = hlo.collectives(compiled.as_text())
    facts = {(c.kind, c.axes(mesh.shape), c.bytes, c.loops, c.branches) for c in found}
    assert facts == {
        ("all-reduce", ("data",), 3 * 4, (), 0),
        ("all-gather", ("data", "tensor"), 16 * 4, (), 0),
        ("collective-permute", ("pipe",), 3 * 4, (TURNS,), 0),
        ("all-reduce", ("tensor",), 3 * 4, (TURNS,), 1),
        ("reduce-scatter", ("pipe",), 8 * 4, (), 0),
    }
    assert len(found) == len(facts)
    assert {c.kind: c.times for c in found}["collective-permute"] == TURNS
    assert all("shard_map" in c.source for c in found)


def test_what_the_traced_program_asks_for(traced):
    requests = hlo.requests(traced[1].jaxpr)
    assert [(r.primitive, r.axes, r.dtype, r.shape, r.looped) for r in requests] == [
        ("psum", ("data",), "float32", (1, 3), False),
        ("all_gather", ("data", "tensor"), "float32", (4,), False),
        ("ppermute", ("pipe",), "float32", (1, 3), True),
        ("pmax", ("tensor",), "float32", (1, 3), True),
        ("reduce_scatter", ("pipe",), "float32", (16,), False),
    ]


def test_instructions_have_their_place(compiled):
    found = hlo.instructions(compiled.as_text())
    loops = [i for i in found if i.kind == "while"]
    assert [i.loops for i in loops] == [()] and ("f32", (1, 3)) in loops[0].results
    assert {i.loops for i in found} == {(), (TURNS,)}
    assert any(i.fused for i in found) and not any(i.fused for i in found if i.kind in ("while", "conditional"))
    assert all(i.branches == 0 for i in found if i.kind == "conditional")


def test_equations_are_counted_inside_everything():
    @jax.custom_vjp
    def triple(x):
        return 3 * x

    triple.defvjp(lambda x: (triple(x), None), lambda _, d: (3 * d,))

    def run(x):
        x = lax.cond(x > 0, lambda x: x + 1, lambda x: (x - 1) * 2, x)  # gt, convert, cond; add; sub, mul
        x = lax.scan(lambda c, _: (jax.jit(jnp.sin)(c), None), x, None, length=7)[0]  # scan; jit; sin
        return triple(x)  # custom_vjp_call; mul

    jaxpr = jax.make_jaxpr(run)(1.0)
    assert hlo.count_equations(jaxpr) == hlo.count_equations(jaxpr.jaxpr) == 6 + 3 + 2
    around = {equation.primitive.name: around for equation, around in hlo.equations(jaxpr)}
    assert around["sin"] == ("scan", "jit") and around["sub"] == ("cond",) and around["scan"] == ()


def test_memory_of_a_compiled_program():
    n = 1 << 16
    step = jax.jit(lambda x, y: (x + 1, jnp.sort(y)[::-1].cumsum() + jnp.sort(x)), donate_argnums=0)
    memory = hlo.memory(step.lower(*[jax.ShapeDtypeStruct((n,), jnp.float32)] * 2).compile())
    assert memory.arguments == 8 * n and memory.aliased == 4 * n
    assert 8 * n <= memory.results < 8 * n + 100 and memory.temporaries >= 4 * n


@pytest.mark.parametrize(
    "form, want",
    [
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("pipe",)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("pipe",)),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups=[2,4]<=[2,4]T(1,0)", ("data", "tensor")),
        ("replica_groups=[2,4]<=[8]", ("pipe", "tensor")),
        ("replica_groups={}", ("data", "pipe", "tensor")),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("replica_groups=mesh['data'=2,'pipe'=2,'tensor'=2] {'pipe'}", ("pipe",)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("data", "tensor")),
        ("replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,2,2]T(1,0,2)) {'c'}", ("tensor",)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("pipe",)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=(0,1,4,5,2,3,6,7) {'b'}", ("data",)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ("data",)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ("pipe", "tensor")),
    ],
)
def test_every_form_of_groups(form, want):
    line = f"ROOT %r = f32[4]{{0}} all-reduce(%x), channel_id=1, {form}, use_global_device_ids=true, to_apply=%add"
    (found,) = hlo.collectives(f"HloModule m, num_partitions=8\n\nENTRY %main (x: f32[4]) -> f32[4] {{\n  {line}\n}}\n")
    assert found.axes(SIZES) == want
    assert sorted(i for group in found.groups for i in group) == list(range(8))


# What XLA:GPU (jax 0.12, a training step for 8 H100) writes: starts with tuples of operands and results, fusions that
# communicate, wrapped collectives, loops without a known number of turns.
GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_all-reduce.clone (param_0: bf16[1,128,256]) -> bf16[1,128,256] {
  %param_0 = bf16[1,128,256]{2,1,0} parameter(0)
  ROOT %all-reduce.174 = bf16[1,128,256]{2,1,0} all-reduce(%param_0), channel_id=3, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%add.1.clone
}

%wrapped_reduce-scatter (p: f32[64]) -> f32[32] {
  %p = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[32]{0} reduce-scatter(%p), channel_id=9, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, to_apply=%add.2
}

%body (carry: (s32[], bf16[1,128,256])) -> (s32[], bf16[1,128,256]) {
  %carry = (s32[], bf16[1,128,256]{2,1,0}) parameter(0)
  %collective-permute-start.2 = ((bf16[1,128,256]{2,1,0}), bf16[1,128,256]{2,1,0}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}, metadata={op_name="jit(step)/while/body/ppermute" scheduling_name="collective-permute-start.2"}
  %collective-permute-done.2 = bf16[1,128,256]{2,1,0} collective-permute-done(%collective-permute-start.2)
  %fusion-start = ((bf16[1,128,256]{2,1,0}), bf16[1,128,256]{2,1,0}) fusion-start(%y), kind=kCustom, calls=%fused_all-reduce.clone
  %fusion-done = bf16[1,128,256]{2,1,0} fusion-done(%fusion-start)
  ROOT %tuple = (s32[], bf16[1,128,256]{2,1,0}) tuple(%i, %fusion-done)
}

%cond (carry.1: (s32[], bf16[1,128,256])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: bf16[2,8], b: f32[16]) -> f32[] {
  %all-gather-start = ((bf16[2,8]{1,0}, f32[16]{0}), (bf16[4,8]{1,0:T(8,128)}, /*index=1*/f32[32]{0})) all-gather-start(%a, %b), channel_id=4, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %all-gather-done = (bf16[4,8]{1,0}, f32[32]{0}) all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((f32[64]{0}), f32[32]{0}) reduce-scatter-start(%c), calls=%wrapped_reduce-scatter
  %reduce-scatter-done = f32[32]{0} reduce-scatter-done(%reduce-scatter-start)
  %all-reduce-start.1 = (f32[3]{0}, s4[3]{0}) all-reduce-start(%d, %e), channel_id=5, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add.3
  %all-reduce-done.1 = (f32[3]{0}, s4[3]{0}) all-reduce-done(%all-reduce-start.1)
  %while.1 = (s32[], bf16[1,128,256]{2,1,0}) while(%t), condition=%cond, body=%body
}
"""  # noqa: E501


def test_asynchronous_forms_of_gpus():
    found = [(c.kind, c.axes(SIZES), c.bytes, c.loops, c.times) for c in hlo.collectives(GPU)]
    assert found == [
        ("all-gather", ("data",), 4 * 8 * 2 + 32 * 4, (), 1),
        ("reduce-scatter", ("data",), 32 * 4, (), 1),
        ("all-reduce", ("pipe", "tensor"), 3 * 4 + 2, (), 1),
        ("collective-permute", ("pipe",), 128 * 256 * 2, (0,), 0),
        ("all-reduce", ("tensor",), 128 * 256 * 2, (0,), 0),
    ]


def test_text_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.collectives("module @jit_step { }")
    with pytest.raises(ValueError, match="unknown form"):
        hlo.collectives("ENTRY %m () -> f32[] {\n  %r = f32[] all-reduce(%x), replica_groups=new['a'], to_apply=%add\n}\n")
