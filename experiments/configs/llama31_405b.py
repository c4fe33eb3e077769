"""Llama 3.1 405B on 4,096 H100: shapes of the published model, 2,048 rows of 8,192 tokens (16 M) a step.

    python main.py compile --config=experiments/configs/llama31_405b.py --cluster=nd-h100-v5 --gpus=4096

Hardware: 4,096 H100 (512 ND H100 v5) to train, none to compile. Result: docs/compile.md has the memory and communication of a
GPU. 126 layers are 128 places, of which two stay empty.
"""

from llm.config import BatchConfig, Config, MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from llm.families import preset


def get_config() -> Config:
    """The configuration."""
    return Config(
        model=preset("llama-3.1-405b"),
        mesh=MeshConfig(data=32, pipe=16, tensor=8),
        pipeline=PipelineConfig(schedule="interleaved", chunks=8, microbatches=64, remat="full"),
        batch=BatchConfig(rows=2048, length=8192),
        optimizer=OptimizerConfig(lr=8e-5, warmup=8000),
        train=TrainConfig(steps=1_000_000, dtype="bfloat16"),
    )
