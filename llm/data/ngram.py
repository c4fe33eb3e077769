"""Perplexities of a unigram and an interpolated bigram model: what a language model has to beat on the same tokens.

Both predict exactly the targets that `batches.held_out_batches` counts: every token of a held-out document but its
first, the end of text included. Unigram: add-one over the vocabulary. Bigram: w c(a, b) / c(a) + (1 - w) unigram(b)
(Jelinek & Mercer 1980, with one weight), w fitted by expectation maximisation on the last tenth of the training tokens
with counts of the rest.
"""

from collections.abc import Iterator

import numpy as np

from llm.data.corpus import Corpus, Split

CHUNK = 1 << 24  # tokens in memory at once
MOST = 1 << 30  # training tokens that are counted; more would change little
SLICE = 1 << 20  # tokens that the weight is fitted on, at most


def perplexities(corpus: Corpus) -> dict[str, float]:
    """unigram_perplexity, bigram_perplexity and bigram_weight on the held-out tokens, and their number: tokens."""
    size = corpus.tokenizer.size
    total = min(corpus.training.tokens, MOST)
    cut = total - min(total // 10, SLICE)
    weight = _fit(*_probabilities(corpus.training, cut, list(_pairs(corpus.training, cut, total)), size))
    pairs = list(_pairs(corpus.held_out, 0, corpus.held_out.tokens))
    bigram_N, unigram_N = _probabilities(corpus.training, total, pairs, size)
    mixed_N = weight * bigram_N + (1 - weight) * unigram_N
    return {
        "unigram_perplexity": _perplexity(unigram_N),
        "bigram_perplexity": _perplexity(mixed_N),
        "bigram_weight": weight,
        "tokens": len(unigram_N),
    }


def _perplexity(probability_N: np.ndarray) -> float:
    return float(np.exp(-np.log(probability_N).mean())) if len(probability_N) else float("nan")


def _pairs(split: Split, start: int, stop: int) -> Iterator[np.ndarray]:
    """(token, next token) int64 [2, n] for the inputs [start, stop) of a stream, without those across a join."""
    for first in range(start, stop, CHUNK):
        last = min(first + CHUNK, stop)
        ids = split.read(first, min(last + 1, split.tokens)).astype(np.int64)
        inside = np.ones(len(ids) - 1, bool)
        ends = split.starts_D[1:] - 1 - first
        inside[ends[(ends >= 0) & (ends < len(inside))]] = False
        yield np.stack([ids[:-1], ids[1:]])[:, inside]


def _probabilities(split: Split, stop: int, pairs: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """c(a, b) / c(a) and the unigram probability of b for each of the pairs, counted on the tokens before `stop`."""
    a_N, b_N = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0), np.int64)
    wanted, index_N = np.unique(a_N * size + b_N, return_inverse=True)
    before_V, after_V, count_U = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(len(wanted), np.int64)
    for x, y in _pairs(split, 0, stop):
        before_V += np.bincount(x, minlength=size)
        after_V += np.bincount(y, minlength=size)
        code = x * size + y
        place = np.searchsorted(wanted, code)
        place = place[(place < len(wanted)) & (wanted[np.minimum(place, len(wanted) - 1)] == code)] if len(wanted) else []
        count_U += np.bincount(place, minlength=len(wanted)).astype(np.int64) if len(place) else 0
    bigram_N = count_U[index_N] / np.maximum(before_V[a_N], 1)
    return bigram_N, (after_V[b_N] + 1) / (after_V.sum() + size)


def _fit(bigram_N: np.ndarray, unigram_N: np.ndarray) -> float:
    """Weight of the bigram that makes the pairs most likely."""
    weight = 0.5
    for _ in range(50 if len(bigram_N) else 0):
        mixed_N = weight * bigram_N + (1 - weight) * unigram_N
        weight = float(np.mean(weight * bigram_N / mixed_N))
    return min(max(weight, 0.0), 0.999)
