"""The training loop."""

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from llm import costs
from llm.cache import Decoder
from llm.checkpoint import Checkpoints
from llm.config import Config
from llm.data.corpus import Corpus, open_corpus
from llm.data.tokenizer import Tokenizer
from llm.devices import select_devices
from llm.evaluate import held_out_loss
from llm.events import EventLog
from llm.fields import finite, to_dict
from llm.generate import continue_prompts, encode_prompts
from llm.metrics import METRICS, Metrics, NoMetrics, check_sinks, read_jsonl
from llm.run import CORPUS, TOKENIZER, Source, own_tokenizer, restore_params
from llm.sampling import Sampling
from llm.signals import StopRequest
from llm.skips import Skips
from llm.step import build
from llm.watchdog import Watchdog
from llm.workdir import CHECKPOINTS, check_resume, locked, save_config
from parallel import distributed
from parallel.cluster import peak_flops
from parallel.errors import CheckError, UserError

SAMPLE_TOKENS = 48


def train(
    config: Config, workdir: str | Path, devices: Sequence[jax.Device] | None = None, began: float | None = None
) -> dict[str, Any]:
    """Train, or go on with the run in `workdir`, until config.train.steps or a SIGINT, SIGTERM or SIGUSR1.

    The folder gets config.json, tokenizer.json, metrics.jsonl, samples.jsonl, checkpoints/, tensorboard/ and corpus/.
    Returns step, loss (of that step), step_time_s (median of this call's steps but the first, which compiles; None
    without any), stopped (the signal's name or None), skipped (updates left out), rollbacks. Raises UserError, CheckError.
    began: when this start counts from in the run's log of events, by time.monotonic; default: now.
    """
    log = EventLog(Path(workdir) if distributed.is_first() else None, began)
    with StopRequest() as stop, locked(workdir) if distributed.is_first() else contextlib.nullcontext(), log:
        return _train(config, Path(workdir), devices, stop, log)


def _train(
    config: Config, workdir: Path, devices: Sequence[jax.Device] | None, stop: StopRequest, log: EventLog
) -> dict[str, Any]:
    for change in check_resume(workdir, config):
        print(f"note: {change}")
    config, devices = select_devices(config, devices)
    check_sinks(config)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, config.checkpoint.keep, config.checkpoint.best, config.checkpoint.metric)
    try:
        start = checkpoints.latest() or 0
        if start >= config.train.steps:
            print(f"the run in {workdir} is finished: step {start} of {config.train.steps}")
            last = dict(step=start, loss=_last_loss(workdir), step_time_s=None)
            return last | dict(stopped=None, skipped=0, rollbacks=0)
        log.step = start
        log.write("start", steps=config.train.steps, devices=len(devices))
        saved = bool(checkpoints.steps())
        source = None if saved else Source.of(config)
        corpus = _open_corpus(config, workdir, checkpoints.meta(start) if start else {}, source)
        program = build(config, devices)
        facts = program.describe()  # refuses a schedule that cannot be
        facts |= corpus.describe(config.train.seed, config.train.steps, config.batch.rows, config.batch.length)
        for name, value in facts.items():
            print(f"{name:<24}{value:,}" if type(value) is int else f"{name:<24}{value}")
        begin = lambda step: _begin(checkpoints, program, step, source)
        if saved or source:
            log.write("restore")
        start, state = checkpoints.newest(begin) if saved else (0, begin(None))
        meta = checkpoints.meta(start) if start else {}
        if start:
            print(f"resuming from step {start}")
        elif saved:
            print("starting from the imported model")
        elif source:
            print(f"starting from the parameters of {source.name} at step {source.step}")
        if distributed.is_first():
            save_config(workdir, config)  # when nothing can be refused any more
        return Loop(config, workdir, program, corpus, checkpoints, stop, begin, log).run(state, start, meta)
    finally:
        checkpoints.close()


def _begin(checkpoints: Checkpoints, program: Any, step: int | None, source: Source | None) -> Any:
    """The state after `step`; 0 is an imported model, which has parameters alone, and None a fresh one."""
    if step:
        return checkpoints.restore(step, program.abstract_state(), program.stored())
    if step is None and source is None:
        return program.init()
    state = program.init()
    del state["params"]  # they are gone before the others are read
    return state | {"params": source.params(program) if source else restore_params(checkpoints, 0, program)}


def _open_corpus(config: Config, workdir: Path, meta: dict[str, Any], source: Source | None) -> Corpus:
    """The corpus; a resumed run must read it with the tokens it began with, and so must a run that begins with `source`."""
    with distributed.first_goes_first("corpus"):  # it builds what the others open
        corpus = open_corpus(own_tokenizer(config.data, workdir), config.model.vocab, workdir / CORPUS)
    corpus.rows(config.batch.length)  # refuses a text shorter than a row
    if config.evaluate.every:
        corpus.held_out_batches(config.batch.rows, config.batch.length)  # refuses when nothing is held out
    if corpus.tokenizer.size > config.model.vocab:
        raise UserError(
            f"the tokenizer has {corpus.tokenizer.size} ids and model.vocab={config.model.vocab}: raise model.vocab"
        )
    if source and source.tokenizer not in (None, corpus.tokenizer.hash):
        raise UserError(f"init_from={source.name} has another tokenizer than data.tokenizer names: leave data.tokenizer empty")
    if meta and (meta["tokenizer"], meta["corpus"]) != (corpus.tokenizer.hash, corpus.identity):
        raise UserError(f"the text behind the data has changed since the run in {workdir} began: use another --workdir")
    if distributed.is_first():
        corpus.tokenizer.save(workdir / TOKENIZER)
    return corpus


def _last_loss(workdir: Path) -> float | None:
    losses = [record["loss"] for record in read_jsonl(workdir / METRICS) if "loss" in record]
    return losses[-1] if losses else None


class Unread(NamedTuple):
    """A step whose metrics are still on the devices: its number, the data position after it, when it was begun."""

    step: int
    position: int
    values: Any
    began: float


class Finish(threading.Thread):
    """Notes when the devices have made some values: `at`, by time.perf_counter, or None as long as they have not."""

    def __init__(self, values: Any):
        super().__init__(name="finish", daemon=True)
        self.values, self.at = values, None
        self.start()

    def run(self) -> None:
        """Wait for them; an error is for who reads them."""
        with contextlib.suppress(Exception):
            jax.block_until_ready(self.values)
            self.at = time.perf_counter()


class Loop:
    """Steps, and what is due after some of them: evaluation, samples, saving.

    The metrics of a step are read while the next one runs, so that the devices do not wait for the host; when something
    is due after a step, they are read before it. begin(step): the state of a checkpoint, or a fresh one for None."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        program: Any,
        corpus: Corpus,
        checkpoints: Checkpoints,
        stop: StopRequest,
        begin: Callable[[int | None], Any],
        log: EventLog,
    ):
        self.config, self.workdir, self.program, self.corpus = config, workdir, program, corpus
        self.checkpoints, self.stop, self.begin, self.log = checkpoints, stop, begin, log
        self.sampler = Decoder(program, rows=1)
        self.row_tokens = config.batch.rows * config.batch.length
        self.watchdog = Watchdog(config.train.watchdog, log.close_soon)
        self.profile = config.profile_range() if distributed.is_first() else None
        device = program.mesh.devices.flat[0]
        peak = peak_flops(device.device_kind, config.train.dtype)
        flops = costs.train_flops_per_token(config.model, config.batch.length) * self.row_tokens
        self.mfu = lambda seconds: flops / seconds / (peak * program.mesh.size) if peak else None

    def run(self, state: Any, start: int, meta: dict[str, Any]) -> dict[str, Any]:
        """Take the steps after `start`, whose checkpoint had this meta; returns what `train` does."""
        self._restart(start, meta)
        self.saved, self.oldest, self.rollbacks = start, math.inf, 0
        self.record, self.times, self.skipped, self.eval_loss = None, [], 0, None
        self.tracing, self.stopped, self.stop_anywhere = False, None, distributed.AnyProcess()
        try:
            if start:
                self._evaluate(state)  # in case the run stopped between saving and evaluating
            state = self._steps(state)
            if self.times and self.skipped == len(self.times) and self.step == self.config.train.steps:
                raise CheckError(
                    f"all {self.skipped} updates were skipped, because the loss or the gradient was not finite or above "
                    "train.spike, so nothing was learned: lower optimizer.lr, or look at the data"
                )
            if self.step > self.saved:
                self._save(state)
            with self.log.phase("save"):
                self.checkpoints.wait()
        finally:
            if self.tracing:
                jax.profiler.stop_trace()
            self.metrics.close()
        if self.step == self.config.train.steps:
            print(f"finished: step {self.step}, loss {self.record['loss']:.4f}, saved in {self.workdir}")
        return {
            "step": self.step,
            "loss": self.record["loss"] if self.record else _last_loss(self.workdir),
            "step_time_s": statistics.median(self.times[1:]) if len(self.times) > 1 else None,
            "stopped": self.stopped if self.step < self.config.train.steps else None,
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
        }

    def _restart(self, step: int, meta: dict[str, Any]) -> None:
        """Go on after `step`. `position` is the number of the next batch: the step, unless a roll-back skipped some."""
        self.step, self.position, self.log.step = step, meta.get("position", step), step
        self.skips = Skips(self.config.train.spike, self.config.train.rollback, meta.get("skips"))
        writes = Metrics if distributed.is_first() else NoMetrics
        self.metrics = writes(self.workdir, self.config, step, self.program.bubble())
        self.metrics.evaluated = distributed.from_first(self.metrics.evaluated)
        self.unread, self.read_at, self.read_step, self.read_position = None, 0.0, step, self.position

    def _steps(self, state: Any) -> Any:
        steps = self.config.train.steps
        self.log.write("data")
        batch = self._batch() if self.step < steps else None
        self.log.write("compile")
        while self.step < steps or self.skips.too_many:
            if self.skips.too_many:  # before a stop, which would save a step that is taken back
                state = batch = None  # their memory is needed
                self.log.write("rollback")
                state = self._roll_back()
                self.log.write("data")
                batch = self._batch()
            if self._stopping():
                break
            self.checkpoints.check()
            self._trace()
            with self.watchdog.watch("step"):
                began = time.perf_counter()
                state, values = self.program.train_step(state, batch, self.skips.limit(self.step + 1))
                if self.log.kind != "steps":  # the first one has compiled, a later one has only begun
                    self.log.write("steps")
                self._read()  # the step before, while this one runs
                self.step, self.position = self.step + 1, self.position + 1
                self.unread = Unread(self.step, self.position, values, began)
                batch = self._next_batch(values) if self.step < steps else None
                if self._due():
                    self._read()
            if self.skips.too_many:
                continue
            self._evaluate(state)
            self._sample(state)
            if self._is_due(self.config.checkpoint.every) and not (self.config.train.rollback and self.skips.row):
                self._save(state)
        self._read()
        return state

    def _stopping(self) -> bool:
        """Whether a signal has come to any process: then all stop after the same step, in several processes the next one."""
        if self.stop_anywhere.ask(bool(self.stop.requested)):
            self.stopped = self.log.why = next(filter(None, distributed.gather(self.stop.requested)))
        return bool(self.stopped)

    def _due(self) -> bool:
        """Whether anything has to be done after this step that needs its metrics or its state."""
        config, last = self.config, self.step == self.config.train.steps
        every = (config.checkpoint.every, config.evaluate.every, config.train.samples_every)
        traced = self.tracing and self.step == self.profile[1]
        return last or traced or any(map(self._is_due, every))

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _read(self) -> None:
        """Wait for the metrics that are still on the devices and write them."""
        if self.unread is None:
            return
        (step, position, values, began), self.unread = self.unread, None
        values = {name: float(value) for name, value in jax.device_get(values).items()}
        now = time.perf_counter()
        seconds, self.read_at = now - max(began, self.read_at), now
        if self.tracing and step == self.profile[1]:
            jax.profiler.stop_trace()
            self.tracing = False
        if self.skips.too_many:  # what comes after them is taken back
            return
        self.read_step, self.read_position = step, position
        self.record = self._record(step, values, seconds)
        self.times.append(seconds)
        self.skipped += self.record["skipped"]
        self.skips.note(step, values["grad_norm"], bool(values["skipped"]))
        self.log.progress(step)
        self.metrics.step(self.record)

    def _trace(self) -> None:
        if self.profile and not self.tracing and self.profile[0] <= self.step + 1 <= self.profile[1]:
            jax.profiler.start_trace(str(self.workdir / "profile"))
            self.tracing = True

    def _roll_back(self) -> Any:
        """The state of the newest checkpoint before the skipped updates; training goes on with the text after them.

        When that leads to as many skipped updates before anything was saved, the next time goes further back."""
        row, last, position = self.skips.row, self.read_step, self.read_position
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        good = [step for step in steps if step <= last - row and step < self.oldest]
        if not good and (steps or self.oldest == 0):
            raise CheckError(
                f"the {row} updates until step {last} were skipped, because the loss or the gradient was not finite or above "
                "train.spike, and there is no checkpoint left to go back to: lower optimizer.lr, or look at the data"
            )
        step = max(good, default=None)
        state = self.begin(step)
        meta = self.checkpoints.meta(step) if step else {}
        for newer in steps:
            if newer > (step or 0):
                self.checkpoints.delete(newer)
        self.metrics.line.say(f"{row} updates in a row were skipped until step {last}: going back to step {step or 0}")
        self.metrics.close()
        self._restart(step or 0, meta)
        self.position = self.read_position = position
        self.saved = self.oldest = step or 0
        self.rollbacks += 1
        return state

    def _batch(self) -> Any:
        config = self.config
        rows = self.program.own_rows
        batch = self.corpus.batch(config.train.seed, self.position, config.batch.rows, config.batch.length, which=rows)
        return self.program.put(batch, rows)

    def _next_batch(self, values: Any) -> Any:
        """The next batch, made while the devices work on the step with these metrics; the log hears if they waited for it."""
        done, began = Finish(values), time.perf_counter()
        batch = self._batch()
        if done.at is not None:
            self.log.data_s += time.perf_counter() - max(began, done.at)
        return batch

    def _record(self, step: int, values: dict[str, float], seconds: float) -> dict[str, Any]:
        tokens, config = int(values["tokens"]), self.config
        epochs = self.corpus.epochs(config.train.seed, self.read_position, config.batch.rows, config.batch.length)
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
            **{f"epoch/{name}".removesuffix("/"): epoch for name, epoch in epochs.items()},
        }

    def _evaluate(self, state: Any) -> None:
        every, last = self.config.evaluate.every, self.step == self.config.train.steps
        if every and self.metrics.evaluated != self.step and (last or self._is_due(every)):
            with self.log.phase("evaluation"), self.watchdog.watch("evaluation"):
                total, tokens = held_out_loss(self.program, state["params"], self.corpus, self.config)
            self.eval_loss = total / tokens
            self.metrics.evaluation({"step": self.step, "eval_loss": self.eval_loss})

    def _sample(self, state: Any) -> None:
        if self._is_due(self.config.train.samples_every):
            with self.log.phase("sample"), self.watchdog.watch("sample"):
                text = self._continue(state["params"], self.corpus.tokenizer, self.config.train.sample_prompt)
            self.metrics.sample(self.step, self.config.train.sample_prompt, text)

    def _continue(self, params: Any, tokenizer: Tokenizer, prompt: str) -> str:
        sampling = Sampling(temperature=0.8, max_tokens=SAMPLE_TOKENS)
        self.sampler.load(params)
        added = continue_prompts(self.sampler, encode_prompts(tokenizer, [prompt]), sampling, tokenizer, {tokenizer.end})
        self.sampler.close()
        return added[0]["text"]

    def _save(self, state: Any) -> None:
        meta = {
            "config": to_dict(self.config),
            "tokenizer": self.corpus.tokenizer.hash,
            "corpus": self.corpus.identity,
            "position": self.position,
            "skips": self.skips.meta(),
            "loss": finite(self.record["loss"]),
            "eval_loss": finite(self.eval_loss) if self.metrics.evaluated == self.step else None,
        }
        with self.log.phase("save"), self.watchdog.watch("saving"):
            self.checkpoints.save(self.step, state, self.program.stored(), meta)
        self.saved, self.oldest = self.step, math.inf
