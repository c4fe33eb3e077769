"""Round trips, determinism and refusals of the tokenizer."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from llm.data.sources import ROOT
from llm.data.tokenizer import END_OF_TEXT, Tokenizer
from parallel.errors import UserError

TEXT = "The state of the Union is strong, and the Union is the state of us all. " * 20


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 300)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_returns_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.size for i in ids)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\r\n\t",
        "\x00\x01",
        "naïve café — “x”",
        "日本語のテキスト",
        "👩‍👩‍👧 🇫🇷",
        "e\u0301",
        "\ufeffa",
        f"a{END_OF_TEXT}b",
        "  a  b  ",
    ],
)
def test_awkward_text_returns_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end not in ids  # the name of a special token in a document is text
    assert tokenizer.encode_batch([text, text]) == [ids, ids]


def test_the_end_of_text_decodes_to_nothing(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.end]) == "a"


def test_save_and_load_keep_ids_and_hash(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json", 300)
    assert (loaded.hash, loaded.size, loaded.end) == (tokenizer.hash, tokenizer.size, tokenizer.end)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)


def test_a_short_text_trains_fewer_entries():
    assert 257 < Tokenizer.train(["the the the the"], 1000).size < 300


def test_training_is_the_same_in_every_process(tokenizer):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from llm.data.tokenizer import Tokenizer; "
        "print(Tokenizer.train([sys.argv[2]], 300).hash)"
    )
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        command = [sys.executable, "-c", code, str(ROOT), TEXT]
        assert subprocess.check_output(command, env=environment, text=True).strip() == tokenizer.hash


def test_nothing_is_added_by_a_loaded_tokenizer(tokenizer, tmp_path):
    """Case E5: a tokenizer that adds a beginning by itself, cuts and pads, gives the plain ids here."""
    tokenizer.save(tmp_path / "plain.json")
    other = Tokenizer.load(tmp_path / "plain.json", 300).inner
    other.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.end)]
    )
    other.enable_truncation(3)
    other.enable_padding(length=50)
    other.save(str(tmp_path / "adding.json"))
    assert json.loads((tmp_path / "adding.json").read_text())["truncation"]
    assert Tokenizer.load(tmp_path / "adding.json", 300).encode(TEXT) == tokenizer.encode(TEXT)


def test_refusals(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"model\.vocab=256 is too small.*257"):
        Tokenizer.train([TEXT], 256)
    with pytest.raises(UserError, match=r"no file.*tokenizer\.json"):
        Tokenizer.load(tmp_path / "none.json", 300)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "bad.json", 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    size = tokenizer.size
    with pytest.raises(UserError, match=rf"ids up to {size - 1}, outside model\.vocab={size - 1}.*vocab to {size} or"):
        Tokenizer.load(tmp_path / "tokenizer.json", size - 1)
    record = json.loads((tmp_path / "tokenizer.json").read_text())
    record["added_tokens"] = []
    record["model"]["vocab"]["<x>"] = record["model"]["vocab"].pop(END_OF_TEXT)
    (tmp_path / "endless.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"endless\.json has no end-of-text token"):
        Tokenizer.load(tmp_path / "endless.json", 300)
