"""The training loop."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from llm import costs
from llm.cache import Decoder
from llm.checkpoint import Checkpoints
from llm.config import Config
from llm.data.corpus import Corpus, open_corpus
from llm.data.tokenizer import Tokenizer
from llm.devices import select_devices
from llm.evaluate import held_out_loss
from llm.fields import to_dict
from llm.generate import continue_prompts, encode_prompts
from llm.metrics import METRICS, Metrics, check_sinks, read_jsonl
from llm.run import CORPUS, TOKENIZER, restore_params
from llm.sampling import Sampling
from llm.signals import StopRequest
from llm.step import build
from llm.workdir import CHECKPOINTS, check_resume, newest_step, save_config
from parallel.cluster import peak_flops
from parallel.errors import CheckError, UserError

SAMPLE_TOKENS = 48


def train(config: Config, workdir: str | Path, devices: Sequence[jax.Device] | None = None) -> dict[str, Any]:
    """Train, or go on with the run in `workdir`, until config.train.steps or a SIGINT or SIGTERM.

    The folder gets config.json, tokenizer.json, metrics.jsonl, samples.jsonl, checkpoints/, tensorboard/ and corpus/.
    Returns step, loss (of that step), step_time_s (median of this call's steps but the first, which compiles; None
    without any), stopped (the signal's name or None). Raises UserError.
    """
    with StopRequest() as stop:
        return _train(config, Path(workdir), devices, stop)


def _train(config: Config, workdir: Path, devices: Sequence[jax.Device] | None, stop: StopRequest) -> dict[str, Any]:
    for change in check_resume(workdir, config):
        print(f"note: {change}")
    config, devices = select_devices(config, devices)
    check_sinks(config)
    workdir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, config.checkpoint.keep)
    try:
        latest = checkpoints.latest()
        if latest is None and newest_step(workdir) is not None:
            raise CheckError(
                f"no checkpoint in {workdir} can be read; nothing was changed: repair or move them, or use another --workdir"
            )
        start = latest or 0
        if start >= config.train.steps:
            print(f"the run in {workdir} is finished: step {start} of {config.train.steps}")
            return {"step": start, "loss": _last_loss(workdir), "step_time_s": None, "stopped": None}
        corpus = _open_corpus(config, workdir, checkpoints.meta(start) if start else None)
        program = build(config, devices)
        facts = program.describe()  # refuses a schedule that cannot be, before the run's own configuration is replaced
        save_config(workdir, config)
        for name, value in facts.items():
            print(f"{name:<24}{value:,}" if type(value) is int else f"{name:<24}{value}")
        if start:
            print(f"resuming from step {start}")
            state = checkpoints.restore(start, program.abstract_state(), program.stored())
        else:
            state = program.init()
        if latest == 0:
            print("starting from the imported model")
            state |= {"params": restore_params(checkpoints, 0, program)}
        return Loop(config, workdir, program, corpus, checkpoints, stop).run(state, start)
    finally:
        checkpoints.close()


def _open_corpus(config: Config, workdir: Path, meta: dict[str, Any] | None) -> Corpus:
    """The corpus; a resumed run must read it with the tokens it began with."""
    corpus = open_corpus(config.data, config.model.vocab, workdir / CORPUS)
    corpus.rows(config.batch.length)  # refuses a text shorter than a row
    if config.evaluate.every:
        corpus.held_out_batches(config.batch.rows, config.batch.length)  # refuses when nothing is held out
    if corpus.tokenizer.size > config.model.vocab:
        raise UserError(
            f"the tokenizer has {corpus.tokenizer.size} ids and model.vocab={config.model.vocab}: raise model.vocab"
        )
    if meta and (meta["tokenizer"], meta["corpus"]) != (corpus.tokenizer.hash, corpus.folder.name):
        raise UserError(f"the text behind data.paths has changed since the run in {workdir} began: use another --workdir")
    corpus.tokenizer.save(workdir / TOKENIZER)
    return corpus


def _last_loss(workdir: Path) -> float | None:
    losses = [record["loss"] for record in read_jsonl(workdir / METRICS) if "loss" in record]
    return losses[-1] if losses else None


class Loop:
    """Steps, and what is due after some of them: evaluation, samples, saving."""

    def __init__(
        self, config: Config, workdir: Path, program: Any, corpus: Corpus, checkpoints: Checkpoints, stop: StopRequest
    ):
        self.config, self.workdir, self.program, self.corpus = config, workdir, program, corpus
        self.checkpoints, self.stop = checkpoints, stop
        self.sampler = Decoder(program, rows=1)
        self.row_tokens = config.batch.rows * config.batch.length
        device = program.mesh.devices.flat[0]
        peak = peak_flops(device.device_kind, config.train.dtype)
        flops = costs.train_flops_per_token(config.model, config.batch.length) * self.row_tokens
        self.mfu = lambda seconds: flops / seconds / (peak * program.mesh.size) if peak else None

    def run(self, state: Any, start: int) -> dict[str, Any]:
        """Take the steps after `start`; returns what `train` does."""
        config = self.config
        self.metrics = Metrics(self.workdir, config, start, self.program.bubble())
        profile = config.profile_range()
        step, record, times, saved, tracing = start, None, [], start, False
        try:
            if start:
                self._evaluate(state, step)  # in case the run stopped between saving and evaluating
            batch = self._batch(step)
            while step < config.train.steps and not self.stop.requested:
                if profile and not tracing and profile[0] <= step + 1 <= profile[1]:
                    jax.profiler.start_trace(str(self.workdir / "profile"))
                    tracing = True
                began = time.perf_counter()
                state, values = self.program.train_step(state, batch)
                step += 1
                batch = self._batch(step) if step < config.train.steps else None  # while the devices work
                values = {name: float(value) for name, value in jax.device_get(values).items()}
                seconds = time.perf_counter() - began
                if tracing and step == profile[1]:
                    jax.profiler.stop_trace()
                    tracing = False
                record = self._record(step, values, seconds)
                times.append(seconds)
                self.metrics.step(record)
                self._evaluate(state, step)
                self._sample(state, step)
                if config.checkpoint.every and step % config.checkpoint.every == 0:
                    self._save(state, step)
                    saved = step
            if step > saved:
                self._save(state, step)
            self.checkpoints.wait()
        finally:
            if tracing:
                jax.profiler.stop_trace()
            self.metrics.close()
        if step == config.train.steps:
            print(f"finished: step {step}, loss {record['loss']:.4f}, saved in {self.workdir}")
        return {
            "step": step,
            "loss": record["loss"] if record else _last_loss(self.workdir),
            "step_time_s": statistics.median(times[1:]) if len(times) > 1 else None,
            "stopped": self.stop.requested if step < config.train.steps else None,
        }

    def _batch(self, step: int) -> Any:
        config = self.config
        batch = self.corpus.batch(config.train.seed, step, config.batch.rows, config.batch.length)
        return self.program.put(batch)

    def _record(self, step: int, values: dict[str, float], seconds: float) -> dict[str, Any]:
        tokens = int(values["tokens"])
        return {
            "step": step,
            "loss": values["loss"],
            "lr": values["lr"],
            "grad_norm": values["grad_norm"],
            "tokens": tokens,
            "step_time_s": seconds,
            "tokens_per_s": tokens / seconds,
            "mfu": self.mfu(seconds),
            "skipped": int(values["skipped"]),
        }

    def _evaluate(self, state: Any, step: int) -> None:
        every = self.config.evaluate.every
        done = any(record["step"] == step and "eval_loss" in record for record in self.metrics.records[-2:])
        if every and not done and (step % every == 0 or step == self.config.train.steps):
            total, tokens = held_out_loss(self.program, state["params"], self.corpus, self.config)
            self.metrics.evaluation({"step": step, "eval_loss": total / tokens})

    def _sample(self, state: Any, step: int) -> None:
        every = self.config.train.samples_every
        if every and step % every == 0:
            text = self._continue(state["params"], self.corpus.tokenizer, self.config.train.sample_prompt)
            self.metrics.sample(step, self.config.train.sample_prompt, text)

    def _continue(self, params: Any, tokenizer: Tokenizer, prompt: str) -> str:
        sampling = Sampling(temperature=0.8, max_tokens=SAMPLE_TOKENS)
        self.sampler.load(params)
        added = continue_prompts(self.sampler, encode_prompts(tokenizer, [prompt]), sampling, tokenizer, {tokenizer.end})
        self.sampler.close()
        return added[0]["text"]

    def _save(self, state: Any, step: int) -> None:
        meta = {
            "config": to_dict(self.config),
            "tokenizer": self.corpus.tokenizer.hash,
            "corpus": self.corpus.folder.name,
        }
        self.checkpoints.save(step, state, self.program.stored(), meta)
