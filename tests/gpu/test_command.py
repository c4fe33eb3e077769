"""The compile command: the document and its table, exit codes, and the hash that train prints too."""

import json
import subprocess
import sys

import jax
import pytest

from llm import overrides, train
from llm.compile import compile_step, table
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from parallel import deviceless

pytestmark = pytest.mark.gpu_compile

SMALL = Config(
    ModelConfig(layers=4, width=16, heads=2, vocab=300),
    MeshConfig(data=2, pipe=2),
    PipelineConfig(microbatches=4),
    BatchConfig(8, 16),
)


@pytest.mark.smoke
def test_train_and_compile_print_the_same_hash(tmp_path, capsys):
    """On CPU devices `train` prints what `compile` gives for CPUs; the program for GPUs has other kernels, and so another."""
    config = overrides.apply(SMALL, [("train.steps", "1"), ("data.paths", "llm/data/text")])
    train.train(config, tmp_path / "run", devices=jax.devices()[:4])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("program")]
    document = compile_step(config, "nd-h100-v5")
    assert line.split()[1] == document["program_on_cpus"] != document["program"]
    check_document(document)


KEYS = (
    "gpu gpus layout parameter_copies_per_step parameter_bytes optimizer_bytes gradient_bytes temporary_bytes total_bytes "
    "capacity_bytes fits matmul_flops collectives kernels spills compile_s flags"
)


def check_document(document):
    json.dumps(document)
    assert set(KEYS.split()) <= set(document)
    assert document["gpus"] == 4 and document["gpu"] == "NVIDIA H100 80GB HBM3" and document["fits"]
    held = [document[f"{name}_bytes"] for name in ("parameter", "optimizer", "gradient", "temporary")]
    assert min(held) > 0 and sum(held) == document["total_bytes"] < document["capacity_bytes"]
    assert all(set(row) == {"kind", "axis", "count", "bytes", "in_loop", "overlapped"} for row in document["collectives"])
    assert {"triton attention_forward", "cublas matmul"} <= {row["name"] for row in document["kernels"]}
    assert all(line in table(document) for line in ("Memory of a GPU", "fits", "data 2 x pipe 2"))


def test_a_step_that_does_not_fit_is_said_with_exit_code_3():
    """A microbatch of 64 rows of 8k tokens keeps more than an A100 of 40 GB holds; one document goes to stdout."""
    config = "experiments/configs/demo.py"
    more = {"batch.rows": 512, "batch.length": 8192, "pipeline.microbatches": 4, "model.max_length": 8192, "model.layers": 4}
    flags = [f"--config.{name}={value}" for name, value in more.items()]
    command = [sys.executable, "main.py", "compile", f"--config={config}", "--cluster=nd-a100-v4-40", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=deviceless.ROOT, timeout=600)
    assert done.returncode == 3, done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert document["gpu"] == "NVIDIA A100-SXM4-40GB" and not document["fits"]
    assert document["total_bytes"] > document["capacity_bytes"]
    assert "compiling: 1 s" in done.stderr
