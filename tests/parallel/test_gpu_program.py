"""What a compiled program does on one GPU: counts, overlap, matrix products, copies of weights; a planted fault is found."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from llm.compile import facts, share
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from llm.step import build
from parallel import deviceless, executor, gpu_program, hlo
from parallel.mesh import make_mesh

MODEL = ModelConfig(layers=8, width=32, heads=4, kv_heads=2, head_dim=8, ffn=72, vocab=256)


def program(**parts):
    config = Config(MODEL, MeshConfig(data=2, pipe=2), PipelineConfig(remat="none", **parts), BatchConfig(16, 32))
    return build(config, jax.devices()[:4])


def compiled_facts(program):
    with jax.set_mesh(program.mesh):
        text = program.traced.lower().compile().as_text()
    return facts(hlo.instructions(text), program, share(program))


@pytest.fixture(scope="module")
def skipping():
    """Facts of the step in skip mode with four layers in a chunk, as a CPU runs it."""
    one = program(chunks=2, microbatches=8, idle="skip")
    return one, compiled_facts(one)


def test_matrix_products_are_those_of_the_model(skipping):
    """Every slot runs once a microbatch and chunk: 6 N a token, and attention's tiles, which this program computes itself."""
    one, found = skipping
    tokens, devices = 16 * 32, 4
    m = one.config.model
    layer = 2 * m.width * m.head_dim * (m.heads + m.kv_heads) + 3 * m.width * m.ffn
    weights = 6 * tokens * (m.layers * layer + m.vocab * m.width) / devices
    attention = m.layers * m.heads * m.head_dim * 32 * tokens / devices  # one product of the full square, halved below
    assert weights < found["matmul_flops"] <= weights + 2 * (2 + 5) * attention


def test_collectives_of_a_step(skipping):
    one, found = skipping
    rows = {(row["kind"], row["axis"], row["in_loop"]): row for row in found["collectives"]}
    ticks, hop = one.tick_table.length, 4 * 32 * 32  # each rank sends one row of fp32 a tick, whether anybody waits or not
    sent = rows["collective-permute", "pipe", True]
    assert (sent["count"], sent["bytes"]) == (2 * ticks, 2 * ticks * hop)
    for kind in ("all-gather", "reduce-scatter"):
        assert (kind, "data", False) in rows and not any(row[0] == kind and row[2] for row in rows)


def planted(slot):
    """The F slot with the fault that its input is gathered over `data`, in every tick."""

    @functools.wraps(slot)
    def f_slot(self, k, s):
        x = jax.tree.map(lambda x: lax.all_gather(x, "data").mean(0), s["x"])
        return slot(self, k, dict(s, x=x))

    return f_slot


def test_an_all_gather_planted_in_the_tick_loop_is_found(monkeypatch):
    monkeypatch.setattr(executor.Executor, "_f_slot", planted(executor.Executor._f_slot))
    one = program(chunks=2, microbatches=8, idle="skip")
    rows = [row for row in compiled_facts(one)["collectives"] if row["in_loop"] and row["axis"] == "data"]
    assert [(row["count"], row["kind"]) for row in rows] in (
        [(one.tick_table.length, "all-gather")],
        [(one.tick_table.length, "all-reduce")],  # a gather whose mean is taken is a sum to some versions of XLA
    )


# ------------------------------------------------------------------------------------------- text of a scheduled program
SCHEDULED = """HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_product (p0: bf16[16,32], p1: bf16[32,64]) -> bf16[16,64] {
  %p0 = bf16[16,32]{1,0} parameter(0)
  %p1 = bf16[32,64]{1,0} parameter(1)
  ROOT %dot = bf16[16,64]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_copy (q0: bf16[2,3,32,64], q1: s32[]) -> (bf16[1,1,32,64]) {
  %q0 = bf16[2,3,32,64]{3,2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %slice = bf16[1,1,32,64]{3,2,1,0} dynamic-slice(%q0, %q1), dynamic_slice_sizes={1,1,32,64}
  ROOT %t = (bf16[1,1,32,64]{3,2,1,0}) tuple(%slice)
}

%fused_sum (r0: f32[4]) -> f32[4] {
  %r0 = f32[4]{0} parameter(0)
  ROOT %add = f32[4]{0} add(%r0, %r0)
}

%idle (i: f32[4]) -> f32[4] {
  ROOT %i = f32[4]{0} parameter(0)
}

%joint (j: f32[4]) -> f32[4] {
  %j = f32[4]{0} parameter(0)
  ROOT %product = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%k, %l), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/while/body/f_slot/leave/cond/branch_1_fun/dot"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
}

%body (carry: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %hop = (f32[4]{0}, f32[4]{0}) collective-permute-start(%a), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}
  %copied = (bf16[1,1,32,64]{3,2,1,0}) fusion(%weights, %i), kind=kLoop, calls=%fused_copy
  %gemm = bf16[16,64]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_product
  %kernel = (f32[4]{0}) custom-call(%y), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/pallas_call"}, backend_config={grid_x = 1 : i32, name = "attention_forward", num_stages = 2 : i32}
  %arrived = f32[4]{0} collective-permute-done(%hop)
  %second = (f32[4]{0}, f32[4]{0}) collective-permute-start(%b), channel_id=2, source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}
  %small = f32[4]{0} fusion(%c), kind=kLoop, calls=%fused_sum
  %sometimes = f32[4]{0} conditional(%p, %c, %c), true_computation=%joint, false_computation=%idle, metadata={op_name="jit(step)/while/body/f_slot/leave/cond"}
  %there = f32[4]{0} collective-permute-done(%second)
  ROOT %tuple = (s32[], f32[4]{0}) tuple(%i, %there)
}

%less (carry.1: (s32[], f32[4])) -> pred[] {
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[64]) -> f32[] {
  %k = f32[8,16]{1,0} parameter(0)
  %shared = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(%a), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add
  %w.1 = bf16[16,64]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_product
  %part = f32[16]{0} reduce-scatter-done(%shared)
  %while.1 = (s32[], f32[4]{0}) while(%t), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}
"""  # noqa: E501


def test_collectives_with_axis_count_and_overlap():
    rows = gpu_program.collectives(hlo.instructions(SCHEDULED), dict(data=2, pipe=2, tensor=2))
    assert rows == [
        dict(kind="reduce-scatter", axis="pipe+tensor", count=1, bytes=64 * 4, in_loop=False, overlapped=True),
        dict(kind="collective-permute", axis="pipe", count=10, bytes=160, in_loop=True, overlapped=True),
        dict(kind="collective-permute", axis="tensor", count=10, bytes=160, in_loop=True, overlapped=False),
    ]


def test_what_hides_a_transfer():
    """A product and a kernel do; a sum of four numbers and a branch that is taken now and then do not."""
    hidden = gpu_program.overlaps(hlo.instructions(SCHEDULED))
    assert {name: [i.name for i in between] for (_, name), between in hidden.items()} == {
        "shared": ["dot"],
        "hop": ["dot", "kernel"],
        "second": [],
    }


def test_flops_count_turns_and_the_share_of_branches():
    found = hlo.instructions(
        SCHEDULED.replace("custom-call(%k, %l)", "custom-call(%j2, %l)").replace("%j = f32[4]", "%j2 = f32[8,16]")
    )
    product, joint = 2 * 16 * 64 * 32, 2 * 8 * 8 * 16
    assert gpu_program.matmul_flops(found) == 11 * product + 10 * joint
    assert gpu_program.matmul_flops(found, lambda source: 0.3 if "leave/cond" in source else 1) == 11 * product + 3 * joint


def test_kernels_by_name():
    rows = gpu_program.kernels(hlo.instructions(SCHEDULED))
    assert {row["name"]: row["count"] for row in rows} == {
        "elementwise fusion": 20,
        "triton matmul": 11,
        "cublas matmul": 10,
        "triton attention_forward": 10,
    }


def test_copies_of_weights():
    copies = gpu_program.parameter_copies(hlo.instructions(SCHEDULED), [("bf16", (2, 3, 32, 64))])
    assert [(i.name, i.bytes, gpu_program.times(i)) for i in copies] == [("slice", 2 * 32 * 64, 10)]
    assert not gpu_program.parameter_copies(hlo.instructions(SCHEDULED), [("f32", (2, 3, 32, 64))])


def test_a_scan_without_collectives_has_none():
    mesh = make_mesh(dict(data=2))
    run = lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile().as_text()
    assert gpu_program.collectives(hlo.instructions(text), mesh.shape) == []


def test_kernels_that_spill_registers(tmp_path, monkeypatch):
    """As the assembler reports them, one file a call."""
    monkeypatch.setenv(deviceless.REPORTS, str(tmp_path))
    line = "ptxas info    : Function properties for {}\n    8 bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    warning = "ptxas warning : Registers are spilled in function 'f', 32 bytes spill stores, 0 bytes spill loads\n"
    (tmp_path / "0.ptxas").write_text(warning)
    (tmp_path / "1.ptxas").write_text(line.format("attention_dkv", 12, 20) + line.format("loop_add_fusion", 0, 0))
    (tmp_path / "2.ptxas").write_text(line.format("attention_dq", 400, 572) + line.format("attention_dkv", 0, 8))
    assert deviceless.spills() == [dict(kernel="attention_dq", bytes=972), dict(kernel="attention_dkv", bytes=32)]
