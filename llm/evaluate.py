"""Held-out loss, perplexity and bits per byte, and the scores of tasks, by the forward-only pipeline."""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from llm.config import Config
from llm.data import ngram
from llm.data.corpus import Corpus
from llm.metrics import read_jsonl
from llm.run import Run, open_run
from llm.score import Row, Scorer, encode, joined
from llm.tasks import Score, Task, load_task, sample, summary
from llm.workdir import CHECKPOINTS, digest, write_atomically
from parallel import distributed
from parallel.axes import AXES
from parallel.errors import CheckError, UserError

SAMPLES = "evaluations"  # folder of a run
COLUMNS = ("acc", "acc_norm", "acc_pmi", "perplexity", "bits_per_byte")


def held_out_loss(program: Any, params: Any, corpus: Corpus, config: Config) -> tuple[float, int]:
    """Sum of the negative log-likelihoods (nats) and number of scored tokens over every held-out document once.

    The sum is over tokens, so it does not depend on how they are batched; the padded rows of the last batch weigh 0.
    """
    total, count = 0.0, 0
    for batch in corpus.held_out_batches(config.batch.rows, config.batch.length):
        scores = program.eval_step(params, program.put(batch))
        total += float(np.asarray(scores["nll"], np.float64).sum())
        count += int(np.asarray(scores["tokens"], np.float64).sum())
    return total, count


def evaluate(workdir: str | Path, step: int | None = None, config: Config | None = None) -> dict[str, Any]:
    """Score a checkpoint of a run on all held-out documents.

    step: which checkpoint; None or -1 for the newest. config: the run's own with another layout or other text, or None.
    Returns step, documents, tokens (scored), bytes (UTF-8 of the text), loss (nats per token), perplexity,
    bits_per_byte, and the perplexities of a unigram and a bigram model on the same tokens. Raises UserError, and CheckError
    when the loss is not finite.
    """
    run = open_run(workdir, step, config)
    counts = ngram.perplexities(run.corpus)
    return {
        **evaluate_run(run),
        "unigram_perplexity": counts["unigram_perplexity"],
        "bigram_perplexity": counts["bigram_perplexity"],
    }


def evaluate_run(run: Run) -> dict[str, Any]:
    """What `evaluate` says of the parameters of an open run: all but the other models' perplexities."""
    total, tokens = held_out_loss(run.program, run.params, run.corpus, run.config)
    if not math.isfinite(total):
        raise CheckError(f"the loss of step {run.step} is not finite: its parameters are damaged, or training had diverged")
    return {
        "step": run.step,
        "documents": run.corpus.held_out.documents,
        "tokens": tokens,
        "bytes": run.corpus.held_out.bytes,
        "loss": total / tokens,
        "perplexity": math.exp(min(total / tokens, 700.0)),
        "bits_per_byte": total / math.log(2) / run.corpus.held_out.bytes,
    }


def table(result: dict[str, Any]) -> str:
    """The result for a reader."""
    size = f"{result['documents']:,} ({result['bytes']:,} bytes, {result['tokens']:,} tokens scored)"
    return "\n".join(
        [
            f"checkpoint          step {result['step']}",
            f"held-out documents  {size}",
            f"loss                {result['loss']:.4f} nats per token",
            f"perplexity          {result['perplexity']:.2f}",
            f"  unigram model     {result['unigram_perplexity']:.2f}",
            f"  bigram model      {result['bigram_perplexity']:.2f}",
            f"bits per byte       {result['bits_per_byte']:.4f}",
        ]
    )


# ------------------------------------------------------------------------------------------- tasks
def evaluate_tasks(
    workdir: str | Path,
    names: Sequence[str],
    limit: int = 0,
    step: int | None = None,
    config: Config | None = None,
    folder: str | Path = "",
) -> dict[str, Any]:
    """Score a checkpoint on tasks (see llm/tasks.py): {step, layout, tasks: {name: metrics}}.

    limit: documents of each task, the first ones; 0 for all. folder: of published tasks, '' for the installed package.
    step and config: as for `evaluate`. Writes the samples of each task to WORKDIR/evaluations/STEP. Of several processes
    the first one writes, and all return the result. Raises UserError.
    """
    tasks = [load_task(name, limit, folder) for name in dict.fromkeys(names)]
    if len(set(distributed.gather(digest(tasks)))) > 1:  # they would run different programs, and wait for each other for ever
        raise UserError("the processes have not read the same --tasks: give all of them the same flags and the same files")
    run = open_run(workdir, step, config, with_corpus=False)
    return run_tasks(run, Scorer(run.config, run.program.devices), tasks, workdir)


def run_tasks(run: Run, scorer: Scorer, tasks: Sequence[Task], workdir: str | Path) -> dict[str, Any]:
    """`evaluate_tasks` of a run that is open. What an interrupted call has scored is not scored again."""
    mesh, table = run.config.mesh.sizes(), run.program.table
    layout = {**mesh, "schedule": table.name, "chunks": table.chunks, "microbatches": table.microbatches}
    stamp = (Path(workdir) / CHECKPOINTS / str(run.step)).stat().st_mtime_ns
    setting = dict(step=run.step, saved=stamp, layout=layout, dtype=run.config.train.dtype, limit=scorer.limit)
    result: dict[str, Any] = {"step": run.step, "layout": layout, "tasks": {}}
    for task in tasks:
        path = samples_path(workdir, run.step, task.name)
        journal = path.with_suffix(".journal")
        try:
            samples = _score(run, scorer, task, journal, setting)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("what was scored is kept, and the same command goes on") from None
        if distributed.is_first():
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in samples))
            journal.unlink()
        result["tasks"][task.name] = summary(task.kind, samples)
    return result


def samples_path(workdir: str | Path, step: int, name: str) -> Path:
    """The file of JSON lines, one for each document, that an evaluation of task `name` leaves."""
    return Path(workdir) / SAMPLES / str(step) / (re.sub(r"[^\w.-]+", "-", name).removesuffix(".jsonl") + ".jsonl")


def _score(run: Run, scorer: Scorer, task: Task, journal: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of a task. The journal is a line with the setting, then a line for each row: key, score."""
    choices = [choice for document in task.documents for choice in document.choices]
    twins = [(i, choice) for i, choice in enumerate(choices) if choice.unconditional is not None]
    pairs = [(c.context, c.continuation) for c in choices] + [(c.unconditional or "", c.continuation) for _, c in twins]
    rows = encode(run.tokenizer, pairs, scorer.limit)
    every = list(dict.fromkeys(row for part in rows for row in part))
    lines = read_jsonl(journal)
    lines = distributed.from_first(lines[1:] if lines[:1] == [setting] else [])  # all processes must score the same rows
    known = {line["key"]: Score(*line["score"]) for line in lines}
    scores: dict[Row, Score] = {row: known[row.key] for row in every if row.key in known}
    if writes := distributed.is_first():
        kept = [dict(key=row.key, score=score) for row, score in scores.items()]
        write_atomically(journal, "".join(json.dumps(line) + "\n" for line in [setting, *kept]))
    with open(journal if writes else os.devnull, "a") as file, _Progress(task.name, len(every), len(scores)) as progress:
        for batch in scorer(run.params, [row for row in every if row not in scores]):
            file.writelines(json.dumps(dict(key=row.key, score=score)) + "\n" for row, score in batch.items())
            file.flush()
            scores |= batch
            progress.show(len(scores))
    total = [joined(scores[row] for row in part) for part in rows]
    free: list[Score | None] = [None] * len(choices)
    for (i, _), score in zip(twins, total[len(choices) :]):
        free[i] = score
    samples, first = [], 0
    for document in task.documents:
        part = slice(first, first := first + len(document.choices))
        samples.append(sample(task, document, total[part], free[part]))
    return samples


class _Progress:
    """A bar on a terminal, elsewhere a line at each tenth."""

    def __init__(self, name: str, total: int, done: int):
        self.name, self.total, self.shown = name, total, done
        console, columns = Console(), (BarColumn(bar_width=10), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console) if console.is_terminal else None
        self.start = done

    def __enter__(self) -> "_Progress":
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(f"{self.name}: {self.total} requests", total=self.total, completed=self.start)
        elif self.start:
            print(f"{self.name}: {self.start} of {self.total} requests were scored before", flush=True)
        return self

    def show(self, done: int) -> None:
        """So many are done."""
        if self.bar:
            self.bar.update(self.task, completed=done)
        elif done == self.total or done - self.shown >= self.total / 10:
            print(f"{self.name}: {done} of {self.total} requests", flush=True)
            self.shown = done

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()


def tasks_table(result: dict[str, Any]) -> str:
    """The result of tasks for a reader: a row for each, with standard errors."""
    used = [name for name in COLUMNS if any(name in metrics for metrics in result["tasks"].values())]

    def cell(metrics: dict[str, Any], name: str) -> str:
        error = metrics.get(f"{name}_stderr")
        return "" if name not in metrics else f"{metrics[name]:.4g}" + ("" if error is None else f" ± {error:.2g}")

    rows = [("task", "n", *used)]
    rows += [(task, str(m["n"]), *(cell(m, name) for name in used)) for task, m in result["tasks"].items()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip() for row in rows]
    layout = " x ".join(f"{axis} {result['layout'][axis]}" for axis in AXES if result["layout"][axis] > 1)
    return "\n".join([f"checkpoint step {result['step']}, {layout or '1 device'}", *lines])
