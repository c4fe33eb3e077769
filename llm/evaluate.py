"""Held-out loss, perplexity and bits per byte by the forward-only pipeline."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from llm.config import Config
from llm.data import ngram
from llm.data.corpus import Corpus
from llm.run import open_run


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
    bits_per_byte, and the perplexities of a unigram and a bigram model on the same tokens. Raises UserError.
    """
    run = open_run(workdir, step, config)
    total, tokens = held_out_loss(run.program, run.params, run.corpus, run.config)
    counts = ngram.perplexities(run.corpus)
    return {
        "step": run.step,
        "documents": run.corpus.held_out.documents,
        "tokens": tokens,
        "bytes": run.corpus.held_out.bytes,
        "loss": total / tokens,
        "perplexity": math.exp(min(total / tokens, 700.0)),
        "bits_per_byte": total / math.log(2) / run.corpus.held_out.bytes,
        "unigram_perplexity": counts["unigram_perplexity"],
        "bigram_perplexity": counts["bigram_perplexity"],
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
