"""How the next token is drawn from its logits, and what ends a text."""

import dataclasses
import math
from collections.abc import Collection

import numpy as np

from parallel.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, in this order: repetition_penalty, temperature, top_k, top_p, min_p, a draw from what is left.

    temperature 0 is the most likely token (of equal ones the lowest id). top_k 0, top_p 1, min_p 0 and repetition_penalty 1
    change nothing. stop: strings that end a text and are not part of it. max_tokens: of one text."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()

    def validate(self) -> "Sampling":
        """Raises UserError on a value outside its range."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature={self.temperature}: give 0 (the most likely token) or a positive number")
        if self.top_k < 0:
            raise UserError(f"--top_k={self.top_k}: give a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p={self.top_p}: give a probability above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"--min_p={self.min_p}: give a share of the largest probability, 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(f"--repetition_penalty={self.repetition_penalty}: give a positive number; 1 is no penalty")
        if self.seed < 0:
            raise UserError(f"--seed={self.seed}: give 0 or a positive number")
        if self.max_tokens < 1:
            raise UserError(f"--max_tokens={self.max_tokens}: give at least 1")
        if "" in self.stop:
            raise UserError("--stop is empty: give the text at which to stop")
        return self

    def generator(self, number: int) -> np.random.Generator:
        """The source of the draws of text `number`, which no other text changes."""
        return np.random.default_rng([self.seed, number])


def choose(logits_V: np.ndarray, sampling: Sampling, rng: np.random.Generator, seen: Collection[int] = ()) -> int:
    """Draw a token id. logits_V: fp32 over the vocabulary. seen: the ids of the text so far, for the repetition penalty."""
    if sampling.repetition_penalty != 1 and seen:
        logits_V = _penalised(logits_V, np.fromiter(seen, np.int64), sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(np.argmax(logits_V))
    ids_N, weights_N = np.arange(len(logits_V)), logits_V
    if 0 < sampling.top_k < len(logits_V):
        ids_N = _largest(logits_V, sampling.top_k)
        weights_N = logits_V[ids_N]
    weights_N = np.exp((weights_N.astype(np.float64) - weights_N.max()) / sampling.temperature)
    if sampling.top_p < 1:
        # all below this weight together have less than 1 - top_p: no need to sort those
        some = np.flatnonzero(weights_N > (1 - sampling.top_p) * weights_N.sum() / len(weights_N))
        order = some[np.argsort(-weights_N[some], kind="stable")]
        enough = np.searchsorted(np.cumsum(weights_N[order]), sampling.top_p * weights_N.sum())
        ids_N, weights_N = ids_N[order[: enough + 1]], weights_N[order[: enough + 1]]
    if sampling.min_p:
        keep_N = weights_N >= sampling.min_p * weights_N.max()
        ids_N, weights_N = ids_N[keep_N], weights_N[keep_N]
    cumulative_N = np.cumsum(weights_N)
    drawn = np.searchsorted(cumulative_N, rng.random() * cumulative_N[-1], side="right")
    return int(ids_N[min(drawn, len(ids_N) - 1)])


def _penalised(logits_V, seen, penalty):
    """Logits of seen ids divided by the penalty, or multiplied where negative (CTRL, arXiv 1909.05858, section 4.1)."""
    logits_V = logits_V.copy()
    logits_V[seen] = np.where(logits_V[seen] > 0, logits_V[seen] / penalty, logits_V[seen] * penalty)
    return logits_V


def _largest(logits_V, number):
    """The ids of the `number` largest, of equal ones the lowest."""
    least = np.partition(logits_V, -number)[-number]
    above, equal = np.flatnonzero(logits_V > least), np.flatnonzero(logits_V == least)
    return np.sort(np.concatenate([above, equal[: number - len(above)]]))
