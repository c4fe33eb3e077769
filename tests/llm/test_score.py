"""Which tokens are scored in which rows, and that a score depends on nothing else."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from llm.data.tokenizer import Tokenizer
from llm.model import Transformer
from llm.score import Row, Scorer, bucket, cut, encode, joined
from llm.step import build
from llm.tasks import Score
from parallel.errors import CheckError, UserError
from tests.llm.runs import small

LAYOUTS = [dict(mesh__pipe=4), dict(mesh__pipe=2, mesh__data=2, mesh__tensor=2)]


@pytest.fixture(scope="module")
def tokenizer():
    words = "the state of the union is strong and the people of the states are free and the union of the people is strong. "
    return Tokenizer.train([words * 30], 300)


# ------------------------------------------------------------------------------------------- which tokens are scored
@pytest.mark.smoke
def test_context_and_continuation_are_one_text(tokenizer):
    ids = lambda text: tuple(tokenizer.encode(text))
    [[row]] = encode(tokenizer, [("the state of", " the union")], 64)
    assert row == Row(ids("the state of the union"), len(ids("the state of")))
    # " the" is one token: it spans this join and is scored whole
    assert len(ids(" the")) == 1
    [[row]] = encode(tokenizer, [("of t", "he union")], 64)
    assert row == Row(ids("of the union"), len(ids("of")))
    [[spaced]] = encode(tokenizer, [("of ", "the union")], 64)
    assert spaced == row
    # nothing before the scored text: it follows the end of a text
    for context, continuation in (("", "the union"), ("t", "he union")):
        [[row]] = encode(tokenizer, [(context, continuation)], 64)
        assert row == Row((tokenizer.end, *ids("the union")), 1)
    with pytest.raises(UserError, match="nothing to score"):
        encode(tokenizer, [("a", "")], 64)


@pytest.mark.smoke
def test_one_begin_of_text(tokenizer):
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    inner.add_special_tokens(["<s>"])
    begin = inner.token_to_id("<s>")
    single = "<s> $A <|endoftext|>"
    ids = [("<s>", begin), ("<|endoftext|>", tokenizer.end)]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ids)
    own = Tokenizer(inner)
    pairs = [("the state", " of the union"), ("", "the union"), ("<s>the", " union")]
    for (context, continuation), [row] in zip(pairs, encode(own, pairs, 64)):
        assert row.ids == (begin, *tokenizer.encode(context + continuation)) and row.ids.count(begin) == 1
        assert row.start == 1 + len(tokenizer.encode(context))


@pytest.mark.smoke
def test_windows():
    assert cut(range(10), 8, 4) == [Row((5, 6, 7, 8, 9), 3)]  # the context loses its beginning
    assert cut(range(11), 1, 4) == [Row((0, 1, 2, 3, 4), 1), Row((4, 5, 6, 7, 8), 1), Row((6, 7, 8, 9, 10), 3)]
    assert [bucket(n, 1000) for n in (1, 32, 33, 49, 97, 150, 900)] == [32, 32, 48, 64, 128, 192, 1000]


@pytest.mark.smoke
@given(st.integers(2, 60), st.integers(1, 59), st.integers(1, 20))
def test_every_token_is_scored_once(count, start, limit):
    start = min(start, count - 1)
    rows = cut(range(count), start, limit)
    assert [i for row in rows for i in row.ids[row.start :]] == list(range(start, count))
    assert all(len(row.ids) - 1 <= limit and row.start >= 1 for row in rows)
    assert all(len(row.ids) - 1 == limit or row.ids[0] == 0 for row in rows)  # no context is given away


# ------------------------------------------------------------------------------------------- scores
SCORED = dict(model__vocab=101, model__max_length=64, model__dropout=0, batch__rows=4)


@pytest.fixture(scope="module")
def model():
    """(a function layout -> function rows -> scores, a function ids -> log-probabilities [S, V]) of one model."""
    plain = build(small(**SCORED), jax.devices()[:1])
    params = jax.tree.map(lambda a: jnp.asarray(3 * a), reference.canonical(plain, plain.init()["params"]))
    transformer = Transformer(plain.config.model, jnp.float32, 1)

    @jax.jit
    def forward(tokens_S, segments_S):
        side = dict(tokens=tokens_S[None], positions=jnp.arange(64)[None], segments=segments_S[None], key=None)
        return jax.nn.log_softmax(reference.forward(transformer, params, side)[0])

    def log_probabilities(ids):
        padding = (0, 64 - len(ids))
        return np.asarray(forward(np.pad(ids, padding), np.pad(np.zeros(len(ids), np.int32), padding, constant_values=-1)))

    def scoring(**layout):
        config = small(**SCORED | layout)
        program = build(config, jax.devices()[: config.mesh.product])
        scorer, placed = Scorer(program.config, program.devices), reference.place(program, params)["params"]

        def score(rows):
            found = {}
            for batch in scorer(placed, rows):
                assert not found.keys() & batch.keys()
                found |= batch
            return found

        return score

    return scoring, log_probabilities


def plain_score(log_probabilities, row):
    logp_SV = log_probabilities(row.ids[:-1])[row.start - 1 : len(row.ids) - 1]
    targets = np.array(row.ids[row.start :])
    picked = logp_SV[np.arange(len(targets)), targets]
    return Score(float(picked.sum()), len(targets), bool((logp_SV.argmax(-1) == targets).all()))


@pytest.fixture(scope="module")
def requests(model):
    """Seven requests of very unequal length; the last one goes on as greedy decoding does."""
    draw = np.random.default_rng(5)
    rows = [
        Row(tuple(draw.integers(0, 101, n).tolist()), start)
        for n, start in ((2, 1), (5, 4), (33, 30), (57, 2), (12, 9), (60, 59))
    ]
    ids = list(range(20))
    for _ in range(3):
        ids.append(int(model[1](ids)[len(ids) - 1].argmax()))
    return [*rows, Row(tuple(ids), 20)]


def check_scores(want, got):
    assert list(want) == list(got)
    for row, score in want.items():
        assert got[row].logprob == pytest.approx(score.logprob, abs=1e-5 * score.tokens)
        assert got[row][1:] == score[1:]


@pytest.mark.smoke
def test_scores_are_those_of_the_plain_model(model, requests):
    scoring, log_probabilities = model
    score = scoring()
    together = score(requests)
    assert len(together) == 7 and [s.greedy for s in together.values()].count(True) == 1
    want = {row: plain_score(log_probabilities, row) for row in requests}
    assert want[requests[-1]].greedy
    check_scores(want, {row: together[row] for row in requests})
    # neither mates nor order change a bit
    assert score(requests[::-1]) == together
    assert {k: v for row in requests for k, v in score([row]).items()} == together
    assert score(requests * 2) == together  # the same request twice is one


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_do_not_depend_on_the_layout(model, requests, layout):
    scoring, log_probabilities = model
    got = scoring(**layout)(requests)
    check_scores({row: plain_score(log_probabilities, row) for row in requests}, {row: got[row] for row in requests})


def test_logits_in_chunks_give_the_same_scores(model, requests, monkeypatch):
    monkeypatch.setattr("llm.kernels.cross_entropy.CHUNK_BYTES", 4 * 51 * 7)  # 7 tokens of a rank's half of the vocabulary
    scoring, log_probabilities = model
    some = [row for row in requests if len(row.ids) <= 33]
    got = scoring(mesh__pipe=2)(some)
    check_scores({row: plain_score(log_probabilities, row) for row in some}, {row: got[row] for row in some})


def test_a_long_text_is_scored_in_windows(model):
    scoring, log_probabilities = model
    ids = [0, *np.random.default_rng(3).integers(0, 101, 25).tolist()]
    whole, windows = cut(ids, 1, 64), cut(ids, 1, 8)
    score = scoring()([*whole, *windows])
    assert len(whole) == 1 and len(windows) == 4
    logp = log_probabilities(ids[:-1])[np.arange(25), ids[1:]]
    assert joined(score[row] for row in whole).logprob == pytest.approx(float(logp.sum()), abs=1e-4)
    assert joined(score[row] for row in windows).tokens == 25
    want = sum(plain_score(log_probabilities, row).logprob for row in windows)
    assert joined(score[row] for row in windows).logprob == pytest.approx(want, abs=1e-4)


def test_equal_logits_and_damaged_parameters(tokenizer):
    program = build(small(**SCORED, mesh__pipe=2), jax.devices()[:2])
    scorer, params = Scorer(program.config, program.devices), program.init()["params"]
    rows = [Row((5, token), 1) for token in (0, 1, 100)]
    [scores] = scorer(jax.tree.map(jnp.zeros_like, params), rows)
    assert [s.greedy for s in scores.values()] == [True, False, False]  # of equal ones the lowest id
    assert [s.logprob for s in scores.values()] == pytest.approx([-math.log(101)] * 3)
    with pytest.raises(CheckError, match="not finite"):
        list(scorer(jax.tree.map(lambda a: a * math.nan, params), rows))
