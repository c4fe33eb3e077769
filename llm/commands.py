"""What each command does with its flags: a thin function that refuses early, imports the work itself, and returns
(document, text, exit code). Nothing here imports jax before everything that can be refused is refused."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from llm import overrides
from llm.commandline import Options
from llm.config import Config
from llm.devices import request_devices
from llm.fields import from_dict, to_dict
from llm.sampling import Sampling
from llm.workdir import CONFIG, MODEL, check_resume, identity, load_config
from parallel import distributed
from parallel.errors import STOPPED, CheckError, UserError


def _run_configuration(options: Options) -> Config:
    """The configuration of the run in --workdir with the overrides, on devices."""
    return _on_devices(load_config(options.workdir, options.changes), options)


def _given(options: Options) -> Config:
    """The configuration of --config, or that of the run in --workdir, without the overrides."""
    if options.config:
        return overrides.load(options.config)
    if (Path(options.workdir) / CONFIG).is_file():
        return load_config(options.workdir, options.changes)
    raise UserError("this command needs --config=FILE, for example --config=experiments/configs/demo.py")


OWN = ("changes", "config", "coordinator", "join_timeout", "json", "process", "processes", "tasks", "tasks_dir", "workdir")
"""Flags in which the processes of a job may differ: places are theirs, and what is there is compared."""


def _on_devices(config: Config, options: Options) -> Config:
    """The configuration with the overrides, on devices that are asked for; joins the job of several processes, if any.

    Commands with the flags PROCESSES can run in several."""
    together = hasattr(options, "coordinator")
    job = distributed.find(options.coordinator, options.processes, options.process) if together else distributed.find()
    if job and not together:
        raise UserError(f"this command runs in one process and this is one of {job.processes} ({job.launcher}): start it once")
    config = request_devices(overrides.apply(config, options.changes), options.devices, job.processes if job else 1)
    if job:
        given = {name: value for name, value in sorted(vars(options).items()) if name not in OWN}
        given["tasks"] = bool(vars(options).get("tasks"))
        command = " ".join(f"--{name}={value}" for name, value in given.items() if value)
        distributed.join(job, options.join_timeout, configuration=identity(config), command=command)
    if config.plan:
        import jax

        from llm.layout import auto_layout

        devices = jax.devices()[: options.devices or None]  # there are more where jax was used before
        config, text = auto_layout(config, devices, options.changes)
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
        return result, f"stopped {at}; the same command goes on", STOPPED
    return result, "", 0


def evaluate(options: Options) -> tuple[Any, str, int]:
    if not options.tasks and (options.limit or options.tasks_dir):
        raise UserError("--limit=N and --tasks_dir=FOLDER are of --tasks=NAME,NAME: name the tasks")
    config = _run_configuration(options)
    check_resume(options.workdir, config, MODEL)
    from llm.evaluate import evaluate, evaluate_tasks, table, tasks_table

    with distributed.guard():
        if options.tasks:
            if not (names := [name for name in options.tasks.split(",") if name]):
                raise UserError(f"--tasks={options.tasks} names no task: --tasks=NAME,NAME")
            result = evaluate_tasks(options.workdir, names, options.limit, options.step, config, options.tasks_dir)
            return result, tasks_table(result), 0
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
    return document, table(document), 0 if document["ok"] else CheckError.code


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
