"""A configuration small enough to train in a test, on a few of the bundled speeches."""

from pathlib import Path

from llm import overrides
from llm.config import Config
from llm.metrics import METRICS, read_jsonl

SMALL = {
    "model.layers": 4,
    "model.width": 32,
    "model.heads": 2,
    "model.vocab": 384,
    "model.dropout": 0.1,
    "batch.rows": 8,
    "batch.length": 32,
    "data.paths": "llm/data/text/197[0-4]*.txt",
    "data.held_out": "1",
    "optimizer.warmup": 5,
    "optimizer.lr": 0.003,
    "train.steps": 12,
    "checkpoint.every": 5,
    "evaluate.every": 6,
}


def small(**changes) -> Config:
    """The small configuration with changes, in which __ stands for a dot."""
    values = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return overrides.apply(Config(), [(name, str(value)) for name, value in values.items()])


def records(workdir: Path) -> list[dict]:
    """The metrics of a run without the times, which differ from run to run."""
    times = ("step_time_s", "tokens_per_s")
    return [{k: v for k, v in record.items() if k not in times} for record in read_jsonl(workdir / METRICS)]
