"""Where the numbers of a run go: metrics.jsonl always, tensorboard events, wandb on request, and a line to look at."""

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from llm.config import Config
from llm.fields import finite, to_dict
from llm.workdir import write_atomically
from parallel.errors import UserError

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. What is none is left out, such as the torn last line of a killed process."""
    return list(_objects(path))


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with open(path, errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(record := json.loads(line), dict):
                    yield record


def keep_until(path: Path, step: int) -> int | None:
    """Drop the lines after `step`, so that a resumed run continues the file as if it had never stopped.

    Returns the last step that was evaluated."""
    part, evaluated = path.with_name(path.name + ".part"), None
    with open(part, "w") as file:
        for record in _objects(path):
            if isinstance(at := record.get("step"), int) and at <= step:
                file.write(json.dumps(record) + "\n")
                evaluated = at if "eval_loss" in record else evaluated
    os.replace(part, path)
    return evaluated


class Metrics:
    """Writes each record to all sinks. `start`: the step that the run continues from; later lines are dropped."""

    def __init__(self, workdir: Path, config: Config, start: int, bubble: float | None):
        self.wandb = _wandb(workdir, config) if config.wandb else None
        self.evaluated = keep_until(workdir / METRICS, start)
        keep_until(workdir / SAMPLES, start)
        self.file = open(workdir / METRICS, "a")  # noqa: SIM115
        self.samples = open(workdir / SAMPLES, "a")  # noqa: SIM115
        self.events = TensorBoard(workdir / "tensorboard", start)
        self.line = Line(config.train.steps, start, bubble)

    def step(self, record: dict[str, Any]) -> None:
        """Metrics of a training step."""
        self._write(record)
        self.line.step(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Metrics of an evaluation."""
        self._write(record)
        self.evaluated = record["step"]
        self.line.say(f"step {record['step']}: held-out loss {record['eval_loss']:.4f}")

    def sample(self, step: int, prompt: str, text: str) -> None:
        """A sample of generated text."""
        self.samples.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
        self.samples.flush()
        self.events.text(step, "sample", prompt + text)
        if self.wandb:
            self.wandb.log({"sample": prompt + text}, step=step)
        self.line.say(f"step {step}: sample: {prompt}{text}")

    def close(self) -> None:
        """Finish all sinks, also when one of them fails."""
        with contextlib.ExitStack() as stack:
            for sink in (self.line, self.file, self.samples, self.events):
                stack.callback(sink.close)
            if self.wandb:
                stack.callback(self.wandb.finish)

    def _write(self, record: dict[str, Any]) -> None:
        record = {name: finite(value) for name, value in record.items()}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        numbers = {name: value for name, value in record.items() if name != "step" and value is not None}
        self.events.scalars(record["step"], numbers)
        if self.wandb:
            self.wandb.log(numbers, step=record["step"])


class TensorBoard:
    """Files that tensorboard reads, in which what a former start wrote after step `start` counts no more.

    Written by the thread that trains: one of its own would die of a full disk, and the run wait for it for ever. When they
    cannot be written, a note says so once, and the run goes on without them."""

    SECONDS = 10.0  # between two writes to the disk

    def __init__(self, folder: Path, start: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        folder.mkdir(exist_ok=True)
        self.writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self.written = 0.0
        self._put(start + 1, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Numbers of a step."""
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._put(step, summary=scalar(name, value))

    def text(self, step: int, name: str, text: str) -> None:
        """A text of a step."""
        from tensorboardX import summary

        self._put(step, summary=summary.text(name, text))

    def close(self) -> None:
        """Write what is left."""
        self._try(lambda: self.writer.close())
        self.writer = None

    def _put(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._try(lambda: self.writer.write_event(Event(wall_time=time.time(), step=step, **content)))
        if time.monotonic() - self.written > self.SECONDS:
            self._try(lambda: self.writer.flush())
            self.written = time.monotonic()

    def _try(self, act: Callable[[], Any]) -> None:
        if self.writer is None:
            return
        try:
            act()
        except OSError as error:
            self.writer = None
            print(f"note: tensorboard's files are not written any more: {error}", file=sys.stderr)


class NoMetrics:
    """What a process that writes none has instead: all but process 0."""

    def __init__(self, *_: Any):
        self.evaluated, self.line = None, self

    def step(self, record: dict[str, Any]) -> None: ...
    def sample(self, step: int, prompt: str, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None:
        """Remember it, as the process that writes does."""
        self.evaluated = record["step"]


class Line:
    """Progress: one line that is redrawn on a terminal, a plain line every now and then elsewhere."""

    def __init__(self, steps: int, start: int, bubble: float | None):
        self.steps, self.every = steps, max(1, steps // 20)
        self.bubble = "" if bubble is None else f"  bubble {bubble:.1%}"
        self.console = Console()
        self.progress = None
        if self.console.is_terminal:
            columns = (BarColumn(bar_width=10), TextColumn("{task.description}"), TimeRemainingColumn())
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task(f"step {start}/{steps}", total=steps, completed=start)
            self.progress.start()

    def step(self, record: dict[str, Any]) -> None:
        """Show a training step."""
        step = record["step"]
        mfu = "n/a" if record["mfu"] is None else f"{record['mfu']:.1%}"
        text = (
            f"step {step}/{self.steps}  loss {record['loss']:.4f}  lr {record['lr']:.1e}  norm {record['grad_norm']:.2f}  "
            f"{record['tokens_per_s']:,.0f} tok/s  MFU {mfu}{self.bubble}{'  SKIPPED' if record['skipped'] else ''}"
        )
        if self.progress:
            self.progress.update(self.task, completed=step, description=text)
        elif step % self.every == 0 or step == self.steps or record["skipped"]:
            print(text, flush=True)

    def say(self, text: str) -> None:
        """Show a line of its own."""
        if self.progress:
            self.progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self.progress:
            self.progress.stop()


def check_sinks(config: Config) -> None:
    """Refuse a sink whose package is missing. Raises UserError."""
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(f"wandb={config.wandb} needs the wandb package: pip install wandb, or leave wandb empty")


def _wandb(workdir: Path, config: Config) -> Any:
    import wandb

    return wandb.init(project=config.wandb, dir=str(workdir), id=_run_id(workdir), resume="allow", config=to_dict(config))


def _run_id(workdir: Path) -> str:
    """The run's identity, kept in its folder so that a resumed run goes on under the same one."""
    path = workdir / "wandb_id"
    if not path.is_file():
        import secrets

        write_atomically(path, secrets.token_hex(4))
    return path.read_text()
