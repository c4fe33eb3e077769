"""Llama 3 8B on 64 H100: shapes of the published model, 128 rows of 8,192 tokens (1 M) a step.

    python main.py compile --config=experiments/configs/llama3_8b.py --cluster=nd-h100-v5 --gpus=64

Hardware: 64 H100 (8 ND H100 v5) to train, none to compile. Result: docs/compile.md has the memory and communication of a GPU.
"""

from llm.config import BatchConfig, Config, MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from llm.families import preset


def get_config() -> Config:
    """The configuration."""
    return Config(
        model=preset("llama-3-8b"),
        mesh=MeshConfig(data=8, pipe=4, tensor=2),
        pipeline=PipelineConfig(schedule="interleaved", chunks=8, microbatches=16, remat="selective"),
        batch=BatchConfig(rows=128, length=8192),
        optimizer=OptimizerConfig(lr=3e-4, warmup=2000),
        train=TrainConfig(steps=100_000, dtype="bfloat16"),
    )
