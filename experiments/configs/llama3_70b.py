"""Llama 3 70B on 256 H100: shapes of the published model, 128 rows of 8,192 tokens (1 M) a step.

    python main.py compile --config=experiments/configs/llama3_70b.py --cluster=nd-h100-v5 --gpus=256
    python main.py plan --config=experiments/configs/llama3_70b.py --cluster=nd-h100-v5 --gpus=1024 --batch_tokens=4M

Hardware: 256 H100 (32 ND H100 v5) to train, none to compile or plan. Result: docs/compile.md has the memory and communication
of a GPU; the plan ranks layouts in seconds.
"""

from llm.config import BatchConfig, Config, MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from llm.families import preset


def get_config() -> Config:
    """The configuration."""
    return Config(
        model=preset("llama-3-70b"),
        mesh=MeshConfig(data=4, pipe=8, tensor=8),
        pipeline=PipelineConfig(schedule="interleaved", chunks=10, microbatches=32, remat="selective"),
        batch=BatchConfig(rows=128, length=8192),
        optimizer=OptimizerConfig(lr=1.5e-4, warmup=2000),
        train=TrainConfig(steps=100_000, dtype="bfloat16"),
    )
