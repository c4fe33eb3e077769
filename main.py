"""Convoy's one entry: `python main.py COMMAND --config=FILE --config.field=value`. `--help` lists the commands.

Everything that can be refused is refused before jax is imported, so a misspelt flag answers at once.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from llm import overrides
from llm.commandline import Command, Flag, Options, dispatch
from llm.config import Config
from llm.devices import request_devices
from llm.workdir import CONFIG, MODEL, check_resume, load_config
from parallel.errors import UserError
from parallel.schedule import command as schedules

INTERRUPTED = 75  # stopped by a signal with everything saved: start again to go on


def _configuration(options: Options) -> Config:
    """The configuration of --config, or that of the run in --workdir, with the overrides applied."""
    if getattr(options, "config", None):
        base = overrides.load(options.config)
    elif hasattr(options, "config") and not (Path(options.workdir) / CONFIG).is_file():
        raise UserError("train needs --config=FILE, for example --config=experiments/configs/demo.py")
    else:
        base = load_config(options.workdir)
        if any(name.startswith("mesh.") for name, _ in options.changes):  # what follows from the mesh is derived again
            base = replace(base, pipeline=replace(base.pipeline, microbatches=0, layers_per_chunk=()))
    return request_devices(overrides.apply(base, options.changes), options.devices)


def train(options: Options) -> tuple[Any, str, int]:
    config = _configuration(options)
    check_resume(options.workdir, config)
    from llm.train import train

    result = train(config, options.workdir)
    if result["stopped"]:
        return result, f"stopped at step {result['step']} and saved: the same command goes on", INTERRUPTED
    return result, "", 0


def evaluate(options: Options) -> tuple[Any, str, int]:
    config = _configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.evaluate import evaluate, table

    result = evaluate(options.workdir, step=options.step, config=config)
    return result, table(result), 0


def generate(options: Options) -> tuple[Any, str, int]:
    config = _configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.generate import Sampling, generate

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed, options.max_tokens).validate()
    if not options.prompt:
        raise UserError('generate needs at least one --prompt="TEXT"')
    results = generate(options.workdir, options.prompt, sampling, step=options.step, config=config)
    return results, "\n\n".join(result["prompt"] + result["text"] for result in results), 0


def timeline(options: Options) -> tuple[Any, str, int]:
    config = _configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.timeline import table, timeline

    result = timeline(options.workdir, config, options.step, options.draw)
    return result, table(result), 0


def import_(options: Options) -> tuple[Any, str, int]:
    from llm.huggingface import import_model, table

    document = import_model(options.source, options.workdir)
    return document, table(document), 0


def export(options: Options) -> tuple[Any, str, int]:
    from llm.huggingface import export_model, table

    document = export_model(options.workdir, options.destination, options.step, options.dtype)
    return document, table(document), 0


WORKDIR = Flag("workdir", None, "FOLDER", "the run's folder: configuration, checkpoints, metrics")
DEVICES = Flag("devices", 0, "N", "number of (virtual CPU) devices; default: the product of the mesh axes")
JSON = Flag("json", False, "", "print one JSON document on stdout, everything else on stderr")
STEP = Flag("step", -1, "N", "which checkpoint; default: the newest")

ALL_GROUPS = tuple(field.name for field in dataclasses.fields(Config))
LAYOUT = ("mesh", "pipeline", "batch")

COMMANDS = {
    "train": Command(
        "Train a model; the same command again goes on where it stopped.",
        train,
        (Flag("config", None, "FILE", "Python file with get_config(); default: the run's own"), WORKDIR, DEVICES, JSON),
        ALL_GROUPS,
    ),
    "evaluate": Command(
        "Loss, perplexity and bits per byte over the held-out documents.",
        evaluate,
        (WORKDIR, STEP, DEVICES, JSON),
        LAYOUT,
    ),
    "generate": Command(
        "Continue prompts with a trained model.",
        generate,
        (
            WORKDIR,
            Flag("prompt", (), "TEXT", "start of a text; repeat the flag for several"),
            Flag("max_tokens", 64, "N", "tokens to add at most; an end of text stops earlier"),
            Flag("temperature", 1.0, "T", "0: always the most likely token"),
            Flag("top_k", 0, "K", "draw from the K most likely tokens; 0: from all"),
            Flag("top_p", 1.0, "P", "draw from the most likely tokens that together have this probability"),
            Flag("seed", 0, "N", "seed of the draws"),
            STEP,
            DEVICES,
            JSON,
        ),
        LAYOUT,
    ),
    "schedule": Command(
        "Describe, compare, search and draw pipeline schedules.",
        lambda options: (*schedules.run(options), 0),
        (*(Flag(*flag) for flag in schedules.FLAGS), JSON),
    ),
    "timeline": Command(
        "Measure the ticks of a run's training step and draw them under the predicted ones.",
        timeline,
        (WORKDIR, Flag("draw", "", "FILE", "picture, .png or .svg; default: WORKDIR/timeline.png"), STEP, DEVICES, JSON),
        LAYOUT,
    ),
    "import": Command(
        "Read a published model: a Hugging Face folder or a GGUF file.",
        import_,
        (Flag("source", None, "PATH", "folder with config.json and safetensors, or a .gguf file"), WORKDIR, JSON),
    ),
    "export": Command(
        "Write a checkpoint as a folder that transformers loads.",
        export,
        (
            WORKDIR,
            Flag("destination", None, "FOLDER", "new folder to write"),
            STEP,
            Flag("dtype", "", "TYPE", "float32, bfloat16 or float16; default: that of the imported model, or float32"),
            JSON,
        ),
    ),
}


def _absl_main(argv: Sequence[str]) -> int:
    logging.set_verbosity(logging.WARNING)
    return dispatch(COMMANDS, argv[1:])


def _parse_no_flags(argv: list[str]) -> list[str]:
    flags.FLAGS(argv[:1])  # the commands have flags of their own; the global ones keep their defaults
    return argv


if __name__ == "__main__":
    app.run(_absl_main, flags_parser=_parse_no_flags)
