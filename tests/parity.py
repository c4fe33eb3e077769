"""How a pipelined step is run on random parameters and compared with the plain one; used by the parity tests."""

import dataclasses

import jax
import numpy as np
import reference
from parity_cases import Case

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig
from llm.step import Program, build
from parallel import pipeline

ROWS, LENGTH, VOCAB, LR, CLIP = 96, 8, 37, 0.5, 0.1
SHAPES = dict(
    llama=dict(kv_heads=2),
    gpt2=dict(norm="layer", positions="learned", mlp="gelu", bias=True, max_length=2 * LENGTH),
)
MODEL = ModelConfig(width=16, heads=4, ffn=24, vocab=VOCAB, dropout=0.1, z_loss=1e-2)
SGD = OptimizerConfig(name="sgd", lr=LR, warmup=0, decay="constant", clip=CLIP, weight_decay=0.0, momentum=0.0)


def configuration(case: Case) -> Config:
    name, _, chunks = case.schedule.partition("/")
    return Config(
        model=dataclasses.replace(MODEL, layers=case.number_of_layers, tied=case.tied == "tied", **SHAPES[case.shape]),
        mesh=MeshConfig(**case.sizes),
        pipeline=PipelineConfig(
            schedule=name,
            chunks=int(chunks or 0),
            group=case.stages + 1 if chunks == "3" else 0,
            microbatches=case.number_of_microbatches,
            idle=case.idle,
            remat=case.remat,
            backward=case.backward,
        ),
        batch=BatchConfig(rows=ROWS, length=LENGTH),
        optimizer=SGD,
        zero=int(case.zero[-1]),
    )


def random_params(program: Program) -> dict:
    """Canonical parameters without any symmetry: no zero bias, no norm scale of 1."""
    r = np.random.default_rng(0)
    draw = lambda s: (0.3 * r.standard_normal((program.layout.layers,) * s.stacked + s.shape)).astype(np.float32)
    return jax.tree.map(draw, program.specs)


def program_of(case: Case) -> Program:
    config = configuration(case)
    return build(config, jax.devices()[: config.mesh.product])


def shared_plan(programs: list[Program]) -> pipeline.Plan:
    """One plan that all of these schedules run with: as many ticks and slots as the largest needs."""
    rows = [p.plan.rows for p in programs]
    slots = {name: max(r.slots[name] for r in rows) for name in rows[0].slots}
    moves = {name: max((r.moves[name] for r in rows), key=len) for name in rows[0].moves}
    ticks = max(len(r.ranks) for r in rows)
    for p, r in zip(programs, rows):
        vars(p)["plan"] = dataclasses.replace(p.plan, rows=r.padded(ticks, slots, moves), poison=True)
    return programs[0].plan


def compiled(program: Program):
    def both(state, batch, table):
        sums, grads = program.gradients(state, batch, table)
        return grads, program.apply(state, sums, grads)

    return jax.jit(both)


def run(program: Program, step, params: dict, rows: dict, table=None) -> dict:
    state = dict(reference.place(program, params), step=np.int32(0), skipped=np.int32(0))
    with jax.set_mesh(program.mesh):
        grads, (state, metrics) = step(state, program.put(rows), program.device_table if table is None else table)
    assert int(state["step"]) == 1
    return dict(
        loss=metrics["loss"],
        grad_norm=metrics["grad_norm"],
        grads=reference.canonical(program, grads),
        params=reference.canonical(program, state["params"]),
    )


def worst(want: dict, got: dict) -> float:
    """The largest relative difference of anything that is compared."""
    return max(reference.difference(want, got).values())


def wanted(program: Program, params: dict, rows: dict) -> dict:
    return reference.step(program.config, params, rows, LR, CLIP)
