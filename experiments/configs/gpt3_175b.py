"""GPT-3 175B as MLPerf training v3.1 ran it, to plan with: one measured run predicts the same job at any scale.

    python main.py plan --config=experiments/configs/gpt3_175b.py --cluster=dgx-h100 --gpus=10752 --batch_tokens=5505024 \\
        --framework=mlperf-eos --precision=fp8 --config.mesh.tensor=4 --config.mesh.pipe=8 --config.pipeline.chunks=12 \\
        --config.pipeline.remat=none --microbatch_rows=1 --sweep=512:10752

Hardware: 512 to 10,752 H100, in multiples of 32. Result: the step time of NeMo in FP8 with its 90 % interval, from constants
that were fitted on the 512-GPU run alone (`mlperf31-Eos_n64`, 11.05 s at 2,048 rows).
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
