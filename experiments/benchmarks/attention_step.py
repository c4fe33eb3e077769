"""A training step of a model of 1.3e9 parameters on one GPU, and its model FLOPs utilisation (attention.py --step)."""

from collections.abc import Callable

import jax

from experiments.benchmarks.common import random_batch
from llm.config import BatchConfig, Config, ModelConfig, PipelineConfig, TrainConfig
from llm.costs import train_flops_per_token
from llm.step import build
from parallel.cluster import peak_flops

MODEL = ModelConfig(layers=24, width=2048, heads=16, kv_heads=8, ffn=5632, vocab=32768, tied=True)
LENGTH, ROWS, MICROBATCHES = 4096, 16, 4


def step(
    medians: Callable, model: ModelConfig = MODEL, length: int = LENGTH, rows: int = ROWS, microbatches: int = MICROBATCHES
) -> dict:
    """Seconds of a step (median of 10), tokens per second and MFU; attention FLOPs are those of whole causal rows."""
    config = Config(
        model=model,
        batch=BatchConfig(rows, length),
        pipeline=PipelineConfig(microbatches=microbatches),
        train=TrainConfig(dtype="bfloat16"),
    )
    program = build(config, jax.devices()[:1])
    state, given = program.init(), program.put(random_batch(rows, length, model.vocab, documents=4))

    def once():
        nonlocal state
        state, metrics = program.train_step(state, given)  # the state is donated
        return state, metrics

    (seconds,) = medians([once], 10)
    flops, peak = train_flops_per_token(model, length) * rows * length, peak_flops(jax.devices()[0].device_kind, "bfloat16")
    return dict(
        parameters=program.parameters,
        attention=program.attention(),
        step_s=seconds,
        tokens_per_s=rows * length / seconds,
        mfu_pct=100 * flops / seconds / peak if peak else None,
    )
