"""GPT-3 175B as MLPerf training v3.1 ran it, to plan with.

    python main.py plan --config=experiments/configs/gpt3_175b.py --cluster=nd-h100-v5 --gpus=10752 --batch_tokens=5505024 \\
        --framework=mlperf-eos --precision=fp8 --config.mesh.tensor=4 --config.mesh.pipe=8 --config.pipeline.chunks=12 \\
        --config.pipeline.remat=none

Hardware: 512 to 10,752 H100. Result: the step time of NeMo in FP8, from constants fitted on the measured 512-GPU run alone.
"""

from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig, TrainConfig


def get_config() -> Config:
    """The configuration."""
    return Config(
        model=ModelConfig(
            layers=96,
            width=12288,
            heads=96,
            vocab=51200,
            max_length=2048,
            norm="layer",
            mlp="gelu",
            bias=True,
            positions="learned",
        ),
        mesh=MeshConfig(data=16, pipe=8, tensor=4),
        pipeline=PipelineConfig(schedule="interleaved", chunks=12, microbatches=128, remat="none"),
        batch=BatchConfig(rows=2048, length=2048),
        train=TrainConfig(dtype="bfloat16"),
    )
