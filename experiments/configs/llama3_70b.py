"""Llama 3 70B, to plan with: shapes of the published model, rows of 8,192 tokens.

    python main.py plan --config=experiments/configs/llama3_70b.py --cluster=nd-h100-v5 --gpus=1024 --batch_tokens=4M

Hardware: 1,024 H100 (128 ND H100 v5). Result: ranked layouts in seconds; the mesh below is only a start for `train`.
"""

from llm.config import BatchConfig, Config, MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from llm.families import preset


def get_config() -> Config:
    """The configuration."""
    return Config(
        model=preset("llama-3-70b"),
        mesh=MeshConfig(data=8, pipe=16, tensor=8),
        pipeline=PipelineConfig(schedule="interleaved", chunks=4, microbatches=64),
        batch=BatchConfig(rows=512, length=8192),
        optimizer=OptimizerConfig(lr=1.5e-4, warmup=2000),
        train=TrainConfig(steps=100_000, dtype="bfloat16"),
    )
