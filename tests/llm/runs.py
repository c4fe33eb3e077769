"""A configuration small enough to train in a test, on a few of the bundled speeches."""

from pathlib import Path

import jax

from llm import overrides
from llm.checkpoint import Checkpoints
from llm.config import Config
from llm.data.tokenizer import Tokenizer
from llm.metrics import METRICS, read_jsonl
from llm.run import TOKENIZER
from llm.step import build
from llm.workdir import CHECKPOINTS, save_config

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


def untrained(workdir: Path, tokenizer: Tokenizer, **changes) -> Path:
    """Makes the folder of a run of which step 3 was saved, with parameters that are not small."""
    config = small(model__layers=2, model__max_length=64, batch__rows=4, **changes).validate()
    program = build(config, jax.devices()[:1])
    state = program.init()
    state["params"] = jax.tree.map(lambda a: 4 * a if a.ndim > 4 else a, state["params"])
    checkpoints = Checkpoints(workdir / CHECKPOINTS, 2)
    checkpoints.save(3, state, program.stored(), {})
    checkpoints.close()
    save_config(workdir, config)
    tokenizer.save(workdir / TOKENIZER)
    return workdir
