"""Cached decoding against the full forward and transformers, in any layout; sampling; texts, their ends and their limits."""

import dataclasses
import json
import math
import types

import jax
import numpy as np
import pytest
import reference
from golden import CASES, LLAMA, golden, llama, load, rows
from tokenizers import processors

from llm.cache import Decoder, piece, text_limit
from llm.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig, TrainConfig
from llm.data.tokenizer import Tokenizer
from llm.generate import Written, continue_ids, continue_prompts, encode_prompts, generate, leading_ids, stop_ids
from llm.huggingface import import_model
from llm.model import Transformer
from llm.sampling import Sampling, choose
from llm.step import build
from parallel.errors import CheckError, UserError

GREEDY = Sampling(temperature=0, max_tokens=64)
LAYOUTS = dict(
    gpt2=dict(pipe=2, idle="compute"),
    llama=dict(pipe=2, data=2, tensor=2),
    llama3=dict(pipe=3),
    mistral=dict(pipe=2, schedule="zb-v", chunks=2),
    qwen2=dict(data=2),
    qwen3=dict(tensor=4),
    gemma2=dict(pipe=4, data=2),
    gemma3=dict(pipe=2, chunks=2, tensor=2, idle="compute"),
)
"""Golden case -> the mesh and the pipeline that decode it; one device without an entry."""


def decoder_of(model: ModelConfig, params: dict, rows: int, dtype: str = "float32", sizes=(4,), places: int = 80, **layout):
    mesh = {axis: layout.pop(axis) for axis in ("data", "pipe", "tensor") if axis in layout}
    config = Config(
        model=model,
        mesh=MeshConfig(**mesh),
        pipeline=PipelineConfig(**layout),
        batch=BatchConfig(8, 32),
        train=TrainConfig(dtype=dtype),
    )
    program = build(config, jax.devices()[: config.mesh.product])
    decoder = Decoder(program, rows, places, sizes)
    decoder.load(reference.place(program, params)["params"])
    return decoder


# ------------------------------------------------------------------------------------------- the cache
@pytest.mark.parametrize("case", CASES)
def test_decoding_equals_the_full_forward_and_transformers(case):
    """Two texts of unequal length, beyond the window, and one alone; then 64 greedy tokens after prompts of unequal length."""
    _, model, params = load(case)
    found = golden(case)
    decoder = decoder_of(model, params, 2, **LAYOUTS.get(case, {}))
    tokens, short = found["tokens"], 27
    logits = decoder.start([tokens[0], tokens[1, :short]], every=True)
    np.testing.assert_allclose(logits[0], found["logits"][0], atol=1e-4)
    np.testing.assert_allclose(logits[1, -short:], found["logits"][1, :short], atol=1e-4)
    np.testing.assert_allclose(decoder.start([tokens[1]], every=True)[0], found["logits"][1], atol=1e-4)  # alone
    prompts = [ids[ids >= 0].tolist() for ids in found["prompts"]]
    np.testing.assert_array_equal(continue_ids(decoder, prompts, GREEDY, model.vocab), found["greedy"])


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 3, 4])
def test_steps_of_any_size_give_the_same(size):
    _, model, params = load("gemma3")
    found = golden("gemma3")
    tokens = found["tokens"]
    decoder = decoder_of(model, params, 2, sizes=(size,))
    logits = [decoder.start(tokens[:, :6], every=True)]
    logits += [decoder.feed(tokens[:, i : i + 1], every=True) for i in range(6, 16)]
    np.testing.assert_allclose(np.concatenate(logits, 1), found["logits"][:, :16], atol=1e-4)


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def three(request):
    """(model, decoder of three rows): learned and rotary positions, with grouped keys."""
    _, model, params = load(request.param)
    return model, params, decoder_of(model, params, 3, data=2, pipe=2)


def test_a_text_does_not_depend_on_its_neighbours(three):
    model, _, decoder = three
    random = np.random.default_rng(1)
    prompts = [random.integers(2, model.vocab, n).tolist() for n in (2, 5, 9)]
    for sampling in (dataclasses.replace(GREEDY, max_tokens=8), Sampling(max_tokens=8, seed=4)):
        together = continue_ids(decoder, prompts, sampling, model.vocab)
        if sampling.temperature == 0:
            assert together == [continue_ids(decoder, [ids], sampling, model.vocab)[0] for ids in prompts]
        assert together[0] == continue_ids(decoder, prompts[:1], sampling, model.vocab)[0]
    ended = continue_ids(decoder, prompts, GREEDY, model.vocab, {together[1][3]})
    assert ended != together and all(together[1][3] not in ids for ids in ended)


def test_a_cache_grows_and_never_wraps(three):
    model, params, _ = three
    found = rows(np.random.default_rng(2).integers(2, model.vocab, (1, 75)).astype(np.int32))
    side = dict(found, key=np.zeros((1, 2), np.uint32))
    tokens, want = found["tokens"], np.asarray(reference.forward(Transformer(model), params, side))[:, :, : model.vocab]
    decoder = decoder_of(model, params, 1, places=60)
    assert decoder.places == 64
    np.testing.assert_allclose(decoder.start(tokens[:, :60])[0], want[0, 59], atol=1e-4)
    with pytest.raises(UserError, match="65 tokens does not fit the cache of 64"):
        decoder.feed(tokens[:, 60:65])
    decoder.reserve(75)
    assert decoder.places == 128
    np.testing.assert_allclose(decoder.feed(tokens[:, 60:75])[0], want[0, 74], atol=1e-4)
    other = np.concatenate([tokens[:, :20], tokens[:, 40:42]], 1)  # begins like the text before: goes on from there
    again = decoder.start(other)
    assert decoder.place == 22 and decoder.text == other[0].tolist()
    decoder.forget()
    np.testing.assert_array_equal(again, decoder.start(other))
    if model.positions == "learned":
        decoder.reserve(200)
        with pytest.raises(UserError, match="does not fit the 80 learned positions"):
            decoder.start(np.ones((1, 81), np.int32))


def test_the_end_of_the_positions_ends_a_text(three):
    model, _, decoder = three
    decoder.reserve(decoder.limit + 4)  # whole steps of 4
    prompts = [[3] * (decoder.limit - 3), [4, 5]]
    added = continue_ids(decoder, prompts, dataclasses.replace(GREEDY, max_tokens=6), model.vocab)
    assert [len(ids) for ids in added] == [3, 6]
    assert added[1] == continue_ids(decoder, [[4, 5]], dataclasses.replace(GREEDY, max_tokens=6), model.vocab)[0]


def test_bfloat16_and_parameters_shared_out_over_data():
    _, model, params = load("llama3")
    found = golden("llama3")
    decoder = decoder_of(model, params, 2, "bfloat16", data=2, pipe=2)
    assert {a.dtype.name for a in jax.tree.leaves(decoder.params["layers"]["up"])} == {"bfloat16"}
    logits = decoder.start(found["tokens"], every=True)
    assert np.corrcoef(logits.ravel(), found["logits"].ravel())[0, 1] > 0.995


@pytest.mark.smoke
def test_pieces_of_a_prompt():
    assert [piece(n, 640, (1, 16, 64)) for n in (1, 2, 16, 17, 64, 65)] == [1, 16, 16, 64, 64, 64]
    assert [piece(n, 20, (1, 16, 64)) for n in (1, 9, 17, 20)] == [1, 16, 16, 16]
    assert piece(9, 12, (1, 16)) == 1 and piece(2, 2, (3,)) == 0
    assert text_limit(Config(batch=BatchConfig(8, 4096))) == 4096 and text_limit(Config()) == 1024
    assert text_limit(Config(model=ModelConfig(positions="learned", max_length=256))) == 256


# ------------------------------------------------------------------------------------------- sampling
@pytest.mark.smoke
def test_choosing_a_token():
    logits_V = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    rng = np.random.default_rng(0)
    draws = lambda number=50, **how: {choose(logits_V, Sampling(**how), rng) for _ in range(number)}
    for more in ({}, dict(top_k=2), dict(top_p=0.1), dict(top_k=3, top_p=0.9, min_p=0.5)):
        assert {choose(logits_V, Sampling(temperature=0, seed=s, **more), rng) for s in range(5)} == {1}  # a tie: the lowest
    assert draws(temperature=1e-8) == {1, 2}
    assert draws(top_k=1, temperature=9.0) == {1}
    assert draws(200, top_k=3, temperature=9.0) == {1, 2, 3}
    assert draws(200, top_k=99, temperature=9.0) == {0, 1, 2, 3}
    assert draws(top_p=0.5) == {1, 2}
    assert draws(top_p=0.39) == {1}
    assert draws(200, top_p=0.84, temperature=1.0) == {1, 2, 3}
    assert draws(min_p=0.5) == {1, 2} and draws(200, min_p=0.3) == {1, 2, 3}
    assert draws(200, temperature=9.0) == {0, 1, 2, 3}
    drawn = np.bincount([choose(logits_V, Sampling(), rng) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(drawn, np.exp(logits_V) / np.exp(logits_V).sum(), atol=0.03)


@pytest.mark.smoke
def test_the_nucleus_is_the_shortest_that_has_the_probability():
    random = np.random.default_rng(0)
    for _ in range(20):
        logits_V, p = random.standard_normal(300).astype(np.float32) * 3, random.uniform(0.05, 0.999)
        order = np.argsort(-logits_V)
        p_V = np.exp(logits_V[order].astype(np.float64))
        number = 1 + np.searchsorted(np.cumsum(p_V / p_V.sum()), p)
        allowed = set(order[:number].tolist())
        drawn = {choose(logits_V, Sampling(top_p=p, temperature=1.0), random) for _ in range(300)}
        assert drawn <= allowed and (number > 30 or order[0] in drawn)


@pytest.mark.smoke
def test_a_penalty_for_what_is_there_already():
    logits_V, rng = np.array([2.0, 3.0, -1.0, -1.5], np.float32), np.random.default_rng(0)
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert [choose(logits_V, greedy, rng, seen) for seen in ((), {1}, {0, 1})] == [1, 0, 1]
    assert choose(logits_V[2:], greedy, rng, {0}) == 1  # -1 becomes -2
    np.testing.assert_array_equal(logits_V, [2, 3, -1, -1.5])


@pytest.mark.smoke
@pytest.mark.parametrize(
    "values",
    [
        *[dict(temperature=t) for t in (-1, math.nan, math.inf)],
        *[dict(top_k=-1), dict(top_p=0), dict(top_p=1.1), dict(min_p=-0.1), dict(min_p=2), dict(seed=-1)],
        *[dict(max_tokens=0), dict(repetition_penalty=0), dict(stop=("a", ""))],
    ],
)
def test_wrong_sampling_is_refused(values):
    with pytest.raises(UserError, match="--" + next(iter(values))):
        Sampling(**values).validate()


# ------------------------------------------------------------------------------------------- texts
@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["the end of the world is the end of the story\n"] * 5, 290)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("the end of the world", (), "the end of the world"),
        ("the end of the world", ("story", "world"), "the end of the "),
        ("the end of the world", ("end of the", "the"), ""),
        ("the wor. the world", ("world!",), "the wor. the world"),
        ("naïve 🙂 the story", ("🙂 the",), "naïve "),
        ("naïve 🙂", (), "naïve 🙂"),
    ],
)
def test_text_comes_whole_and_ends_at_a_stop_string(tokenizer, text, stop, want):
    written = Written(tokenizer, tokenizer.encode("a story of "), stop)
    shown = []
    for token in tokenizer.encode(text):
        shown.append(written.add(token))
        if written.ended:
            break
    shown.append(written.finish())
    assert "".join(shown) == written.text == want and written.ended == (want != text)
    assert not any("\ufffd" in part for part in shown)


@pytest.mark.smoke
def test_half_a_character_at_the_end_is_shown_as_such(tokenizer):
    written = Written(tokenizer, tokenizer.encode("a"))
    assert [written.add(token) for token in tokenizer.encode("🙂")[:-1]] == ["", "", ""]
    assert set(written.finish()) == {"\ufffd"} == set(written.text)


@pytest.mark.smoke
def test_a_beginning_of_sequence_is_put_in_front_once(tokenizer):
    assert leading_ids(tokenizer) == [] and encode_prompts(tokenizer, ["the"]) == [tokenizer.encode("the")]
    other = Tokenizer(type(tokenizer.inner).from_str(tokenizer.inner.to_str()))
    end = other.inner.id_to_token(other.end)
    other.inner.post_processor = processors.TemplateProcessing(f"{end} $A {end}", None, [(end, other.end)])
    assert encode_prompts(other, ["the"]) == [[other.end, *other.encode("the")]]
    with pytest.raises(UserError, match="empty"):
        encode_prompts(other, ["the", ""])


@pytest.fixture(scope="module")
def imported(tmp_path_factory, tokenizer):
    """The run folder of an imported random model that ends texts with one of two ids."""
    folder, workdir = (tmp_path_factory.mktemp(name) for name in ("source", "imported"))
    llama(folder, vocab_size=300, eos_token_id=7, max_position_embeddings=128)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    tokenizer.save(folder / "tokenizer.json")
    import_model(folder, workdir)
    return workdir


def test_an_imported_model_continues_texts(imported, tokenizer):
    assert stop_ids(imported, tokenizer) == {tokenizer.end, 7, 9}
    sampling = Sampling(temperature=0, max_tokens=12, repetition_penalty=1.3)
    shown = {0: "", 1: ""}

    def on_text(row, text):
        shown[row] += text

    one, two = generate(imported, ["the end", "world"], sampling, on_text=on_text)
    assert list(one) == ["prompt", "text", "token_ids"] and one["prompt"] == "the end"
    assert one["text"] == tokenizer.decode(one["token_ids"]) == shown[0] and two["text"] == shown[1]
    assert 0 < len(one["token_ids"]) <= 12 and not {7, 9} & {*one["token_ids"], *two["token_ids"]}
    with pytest.raises(UserError, match="2000 tokens and a text of this model at most 128"):
        generate(imported, ["~" * 2000], sampling)


@pytest.mark.smoke
def test_logits_that_are_not_finite_are_refused():
    decoder = types.SimpleNamespace(limit=9, start=lambda texts: np.array([[1.0, np.nan]]))
    with pytest.raises(CheckError, match="logits that are not finite"):
        continue_ids(decoder, [[1]], GREEDY, 2)


def test_stop_strings_end_a_text(imported, tokenizer):
    from llm.generate import open_decoder

    decoder, _ = open_decoder(imported, 1)
    ids = tokenizer.encode("the end")
    sampling = Sampling(temperature=0, max_tokens=12, repetition_penalty=1.3)
    whole = continue_prompts(decoder, [ids], sampling, tokenizer, ())[0]
    place = next(i for i in range(2, len(whole["text"])) if whole["text"].find(whole["text"][i]) == i)
    stop = whole["text"][place]
    cut = continue_prompts(decoder, [ids], dataclasses.replace(sampling, stop=("no", stop)), tokenizer, ())[0]
    assert cut["text"] == whole["text"][:place] and cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) < len(whole["token_ids"]) and LLAMA["vocab_size"] == 101
