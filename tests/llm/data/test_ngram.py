"""The baselines against plain loops, on the very tokens that a model is scored on."""

import collections
import itertools
import math
import types

import numpy as np
import pytest

from llm.data import ngram
from llm.data.corpus import open_corpus
from tests.llm.data.small import data_config


def loops(corpus):
    """Unigram and bigram probabilities of the scored held-out tokens, counted one by one."""
    split = corpus.training
    documents = [split.read(int(a), int(b)).tolist() for a, b in zip(split.starts_D[:-1], split.starts_D[1:])]
    single, double = collections.Counter(), collections.Counter()
    for document in documents:
        single.update(document[1:])
        double.update(itertools.pairwise(document))
    before = collections.Counter()
    for (a, _), n in double.items():
        before[a] += n
    total, size = sum(single.values()), corpus.tokenizer.size
    unigram, bigram = [], []
    for batch in corpus.held_out_batches(3, 7):
        scored = batch["weights"] > 0
        for a, b in zip(batch["tokens"][scored].tolist(), batch["targets"][scored].tolist()):
            unigram.append((single[b] + 1) / (total + size))
            bigram.append(double[a, b] / max(before[a], 1))
    return np.array(unigram), np.array(bigram)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    random = np.random.default_rng(0)
    words = ["state", "of", "the", "union", "and", "people", "peace", "war", "we", "must"]
    for number in range(12):
        text = " ".join(words[i] for i in random.zipf(1.5, 40 + number) % len(words))
        (folder / f"{number:02d}.txt").write_text(text)
    return open_corpus(data_config(folder, held_out="3"), 270, folder / "cache")


@pytest.mark.parametrize("chunk", [1 << 24, 7, 1])
def test_equal_to_loops(small, monkeypatch, chunk):
    monkeypatch.setattr(ngram, "CHUNK", chunk)
    result = ngram.perplexities(small)
    unigram, bigram = loops(small)
    weight = result["bigram_weight"]
    assert result["tokens"] == small.held_out.scored == len(unigram)
    assert result["unigram_perplexity"] == pytest.approx(math.exp(-np.log(unigram).mean()), rel=1e-12)
    mixed = weight * bigram + (1 - weight) * unigram
    assert result["bigram_perplexity"] == pytest.approx(math.exp(-np.log(mixed).mean()), rel=1e-12)


def test_the_weight_is_the_best_for_its_slice():
    random = np.random.default_rng(1)
    bigram, unigram = random.uniform(0, 1, 500) * (random.uniform(size=500) > 0.3), random.uniform(0.01, 0.1, 500)
    likelihood = lambda w: np.log(w * bigram + (1 - w) * unigram).sum()
    grid = np.linspace(0.001, 0.999, 999)
    assert ngram._fit(bigram, unigram) == pytest.approx(grid[np.argmax([likelihood(w) for w in grid])], abs=2e-3)
    assert ngram._fit(np.zeros(0), np.zeros(0)) == 0.5


def test_the_weight_does_not_see_the_held_out_documents(small):
    other = types.SimpleNamespace(tokenizer=small.tokenizer, training=small.training, held_out=small.training)
    assert ngram.perplexities(other)["bigram_weight"] == ngram.perplexities(small)["bigram_weight"]


def test_the_bundled_text_has_the_known_baselines(bundled):
    result = ngram.perplexities(bundled)
    assert result["tokens"] == 31036
    assert result["unigram_perplexity"] == pytest.approx(197.1, rel=0.01)
    assert result["bigram_perplexity"] == pytest.approx(34.2, rel=0.01)
