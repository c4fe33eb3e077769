"""Text from a model, by repeated forward passes."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm.config import Config
from llm.data.tokenizer import Tokenizer
from parallel.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    temperature 0 is the most likely token (of equal ones the lowest id); top_k 0 and top_p 1 leave out nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 64

    def validate(self) -> "Sampling":
        """Raises UserError on a value outside its range."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature={self.temperature}: give 0 (the most likely token) or a positive number")
        if self.top_k < 0:
            raise UserError(f"--top_k={self.top_k}: give a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p={self.top_p}: give a probability above 0 and at most 1")
        if self.seed < 0:
            raise UserError(f"--seed={self.seed}: give 0 or a positive number")
        if self.max_tokens < 1:
            raise UserError(f"--max_tokens={self.max_tokens}: give at least 1")
        return self


def choose(logits_V: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """Draw a token id. logits_V: fp32 over the vocabulary."""
    if sampling.temperature == 0:
        return int(np.argmax(logits_V))
    logits_V = logits_V.astype(np.float64)
    ids_V = np.argsort(-logits_V, kind="stable")
    scaled_V = (logits_V[ids_V] - logits_V[ids_V[0]]) / sampling.temperature
    if sampling.top_k:
        scaled_V = scaled_V[: sampling.top_k]
    p_V = np.exp(scaled_V)
    cumulative_V = np.cumsum(p_V / p_V.sum())
    if sampling.top_p < 1:
        cumulative_V = cumulative_V[: 1 + int(np.searchsorted(cumulative_V, sampling.top_p))]
    drawn = np.searchsorted(cumulative_V, rng.random() * cumulative_V[-1], side="right")
    return int(ids_V[min(drawn, len(cumulative_V) - 1)])


def batch_config(config: Config, prompts: int, length: int) -> Config:
    """The configuration with a batch just large enough for `prompts` rows of `length` tokens."""
    shards = config.mesh.batch_shards
    per_shard = -(-prompts // shards)
    microbatches = min(per_shard, config.mesh.pipe)
    rows = shards * microbatches * -(-per_shard // microbatches)
    return dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, rows=rows, length=length),
        pipeline=dataclasses.replace(config.pipeline, microbatches=microbatches, group=0),
    )


def context_length(config: Config, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Row length for prompts and what is added: a multiple of 32, at most the length of the training rows."""
    need = max(len(ids) for ids in prompts) + max_tokens
    return min(config.batch.length, -(-need // 32) * 32)


def continue_prompts(
    program: Any, params: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, end: int, size: int
) -> list[list[int]]:
    """Ids added to each prompt (ids), stopping at `end`, which is left out; only ids below `size` are drawn.

    Every row has its own positions, from 0, with padding behind the text, so a prompt's text does not depend on its
    neighbours. A text longer than a row goes on from its last tokens.
    """
    rows, length = program.batch_shape
    texts = [list(ids) for ids in prompts]
    rngs = [np.random.default_rng([sampling.seed, number]) for number in range(len(texts))]
    going = set(range(len(texts)))
    for _ in range(sampling.max_tokens):
        batch = program.put(_rows(texts, rows, length, end))
        logits_RV = np.asarray(program.next_logits(params, batch), np.float32)
        for number in sorted(going):
            token = choose(logits_RV[number, :size], sampling, rngs[number])
            if token == end:
                going.remove(number)
            else:
                texts[number].append(token)
        if not going:
            break
    return [text[len(ids) :] for text, ids in zip(texts, prompts)]


def _rows(texts: list[list[int]], rows: int, length: int, end: int) -> dict[str, np.ndarray]:
    tokens_BS = np.full((rows, length), end, np.int32)
    segments_BS = np.full((rows, length), -1, np.int32)
    positions_BS = np.zeros((rows, length), np.int32)
    last_R = np.zeros(rows, np.int32)
    for row, text in enumerate(texts):
        ids = text[-length:]
        tokens_BS[row, : len(ids)] = ids
        segments_BS[row, : len(ids)] = 0
        positions_BS[row, : len(ids)] = np.arange(len(ids))
        last_R[row] = len(ids) - 1
    return {
        "tokens": tokens_BS,
        "targets": np.full((rows, length), end, np.int32),
        "segments": segments_BS,
        "positions": positions_BS,
        "weights": np.zeros((rows, length), np.float32),
        "example": np.arange(rows, dtype=np.int32),
        "last": last_R,
    }


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of the prompts. Raises UserError on an empty one: a model continues a text."""
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if not encoded or not all(encoded):
        raise UserError("--prompt is empty: give the start of a text")
    return encoded


def generate(
    workdir: str | Path,
    prompts: Sequence[str],
    sampling: Sampling | None = None,
    step: int | None = None,
    config: Config | None = None,
) -> list[dict[str, Any]]:
    """Continue prompts with a checkpoint of a run: a list of prompt, text (what was added) and token_ids (of text).

    step and config: as for `evaluate`. Raises UserError.
    """
    from llm.run import TOKENIZER, open_run
    from llm.workdir import load_config

    sampling = (sampling or Sampling()).validate()
    config = config or load_config(workdir)
    tokenizer = Tokenizer.load(Path(workdir) / TOKENIZER, config.model.vocab)
    encoded = encode_prompts(tokenizer, prompts)
    length = context_length(config, encoded, sampling.max_tokens)
    run = open_run(workdir, step, batch_config(config, len(encoded), length), with_corpus=False)
    added = continue_prompts(run.program, run.params, encoded, sampling, tokenizer.end, tokenizer.size)
    return [
        {"prompt": prompt, "text": tokenizer.decode(ids), "token_ids": [int(i) for i in ids]}
        for prompt, ids in zip(prompts, added)
    ]
