"""Building, opening again, rebuilding, being killed, being raced; what is held out; what is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from llm.data import corpus as corpus_module
from llm.data import sources, tokenization
from llm.data.corpus import open_corpus
from llm.data.sources import ROOT, Documents, choose_held_out, digest, documents, find_sources
from llm.data.tokenizer import Tokenizer
from parallel.errors import UserError
from tests.llm.data.small import data_config

TEXTS = {f"{name}.txt": f"{name} speaks of the state of the union. " * 9 for name in ("adams", "grant", "polk", "tyler")}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "text" / name).write_text(text)
    return tmp_path / "text"


def texts_of(split, tokenizer):
    """Text of every document, by name; each must end with the end of text and hold it nowhere else."""
    found = {}
    for name, start, stop in zip(split.names, split.starts_D[:-1].tolist(), split.starts_D[1:].tolist()):
        ids = split.read(start, stop).tolist()
        assert ids[-1] == tokenizer.end and tokenizer.end not in ids[:-1]
        found[name] = tokenizer.decode(ids)
    return found


def test_everything_is_there_once(folder, tmp_path):
    corpus = open_corpus(data_config(folder, held_out="polk*"), 270, tmp_path / "cache")
    assert texts_of(corpus.held_out, corpus.tokenizer) == {"polk.txt": TEXTS["polk.txt"]}
    training = {name: text for name, text in TEXTS.items() if name != "polk.txt"}
    assert texts_of(corpus.training, corpus.tokenizer) == training
    assert corpus.training.bytes == sum(map(len, training.values()))
    assert (corpus.held_out.documents, corpus.held_out.bytes) == (1, len(TEXTS["polk.txt"]))
    assert corpus.held_out.scored == len(corpus.tokenizer.encode(TEXTS["polk.txt"]))
    assert sum(batch["weights"].sum() for batch in corpus.held_out_batches(2, 16)) == corpus.held_out.scored
    assert corpus.rows(16) == -(-(corpus.training.tokens - 1) // 16)
    part, whole = corpus.batch(0, 3, 4, 16, np.array([1, 2])), corpus.batch(0, 3, 4, 16)
    assert all(np.array_equal(part[key], whole[key][1:3]) for key in whole)


def test_the_tokenizer_sees_only_training_documents(folder, tmp_path):
    config = data_config(folder, held_out="polk*")
    first = open_corpus(config, 300, tmp_path / "cache")
    (folder / "polk.txt").write_text("zzzz zzzz zzzz zzzz zzzz zzzz")
    second = open_corpus(config, 300, tmp_path / "cache")
    assert first.identity != second.identity and first.tokenizer.hash == second.tokenizer.hash


def test_built_once_and_again_when_anything_changes(folder, tmp_path, monkeypatch):
    built = []
    original = corpus_module.tokenise
    monkeypatch.setattr(corpus_module, "tokenise", lambda *a: (built.append(1), original(*a)))

    def open_and_count(config, vocab=270):
        built.clear()
        return open_corpus(config, vocab, tmp_path / "cache"), len(built)

    config = data_config(folder, held_out="1")
    first, n = open_and_count(config)
    assert n == 1
    assert open_and_count(config)[1] == 0
    assert open_and_count(config, vocab=280)[1] == 1
    other, _ = open_and_count(data_config(folder, held_out="2"))
    assert other.held_out.documents == 2 and other.identity != first.identity
    first.tokenizer.save(tmp_path / "tokenizer.json")
    given = data_config(folder, held_out="1", tokenizer=tmp_path / "tokenizer.json")
    same, n = open_and_count(given)
    assert n == 0 and same.identity != first.identity  # the same tokens by another recipe
    assert open_and_count(data_config(folder, held_out="3", tokenizer=tmp_path / "tokenizer.json"))[1] == 0
    os.utime(folder / "polk.txt")  # touched, not changed
    assert open_and_count(config)[1] == 0
    text = TEXTS["polk.txt"].replace("union", "Onion")  # of the same size, at once
    (folder / "polk.txt").write_text(text)
    changed, n = open_and_count(config)
    assert (
        n == 1
        and "Onion"
        in (texts_of(changed.training, changed.tokenizer) | texts_of(changed.held_out, changed.tokenizer))["polk.txt"]
    )
    (folder / "zz.txt").write_text("one more document")
    assert open_and_count(config)[1] == 1
    monkeypatch.setattr(corpus_module, "FORMAT", 99)
    assert open_and_count(config)[1] == 1


def test_old_files_are_not_read_again(folder, tmp_path, monkeypatch):
    config = data_config(folder)
    open_corpus(config, 270, tmp_path / "cache")
    monkeypatch.setattr(time, "time", lambda: os.stat(folder / "polk.txt").st_ctime + 10)
    open_corpus(config, 270, tmp_path / "cache")  # now they are old enough to be remembered
    monkeypatch.setattr(tokenization.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    open_corpus(config, 270, tmp_path / "cache")


@pytest.mark.parametrize("harm", ["tokens.00000.bin", "index.json", "tokenizer.json", "documents.bin"])
def test_a_damaged_folder_is_built_again(folder, tmp_path, harm):
    config = data_config(folder)
    corpus = open_corpus(config, 270, tmp_path / "cache")
    path = corpus.stores[0].folder / harm
    path.write_bytes(path.read_bytes()[:-10])
    again = open_corpus(config, 270, tmp_path / "cache")
    assert texts_of(again.training, again.tokenizer) == TEXTS


PROCESS = """
import os, signal, sys, types
sys.path.insert(0, sys.argv[1])
from llm.data import corpus, tokenization
if sys.argv[4] == "die":
    tokenization._join = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
config = types.SimpleNamespace(paths=(sys.argv[2],), held_out="1", tokenizer="", mixture=())
print(corpus.open_corpus(config, 270, sys.argv[3]).training.tokens)
"""


def start(folder, cache, what):
    command = [sys.executable, "-c", PROCESS, str(ROOT), str(folder), str(cache), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_build_leaves_nothing_that_is_used(folder, tmp_path):
    assert start(folder, tmp_path / "cache", "die").wait() == -signal.SIGKILL
    assert (tmp_path / "cache" / "work").is_dir()
    corpus = open_corpus(data_config(folder, held_out="1"), 270, tmp_path / "cache")
    assert corpus.training.documents == 3 and not (tmp_path / "cache" / "work").exists()


def test_processes_that_build_at_once_agree(folder, tmp_path):
    processes = [start(folder, tmp_path / "cache", "live") for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_units_and_pieces_of_any_size_hold_the_same_tokens(folder, tmp_path, monkeypatch, size):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    (folder / "long.jsonl").write_text(json.dumps({"text": "word " * 100 + "日本語" * 50}) + "\n")
    plain = open_corpus(data_config(folder, held_out="1"), 270, tmp_path / "plain")
    plain.tokenizer.save(tmp_path / "tokenizer.json")
    monkeypatch.setattr(tokenization, "UNIT", 30 * size)
    monkeypatch.setattr(tokenization, "TOGETHER", 40 * size)
    monkeypatch.setattr(sources, "PIECE", 50 * size)
    config = data_config(folder, held_out="1", tokenizer=tmp_path / "tokenizer.json")
    other = open_corpus(config, 270, tmp_path / "cut")
    assert texts_of(other.training, other.tokenizer) == texts_of(plain.training, plain.tokenizer)
    assert (other.training.bytes, other.held_out.bytes) == (plain.training.bytes, plain.held_out.bytes)
    assert len(other.stores[0].index["files"]) == {1: 5, 5: 5, 1 << 20: 1}[size]


def test_cutting_a_text_does_not_change_its_tokens(tmp_path, monkeypatch):
    text = (ROOT / "llm/data/text/1974_richard_nixon.txt").read_text()[:8000]
    tokenizer = Tokenizer.train([text], 400)
    monkeypatch.setattr(sources, "PIECE", 300)
    (tmp_path / "a.txt").write_text(text)
    ((_, pieces),) = documents(find_sources([str(tmp_path / "a.txt")]))
    pieces = list(pieces)
    assert len(pieces) > 20 and "".join(pieces) == text
    assert [i for ids in tokenizer.encode_batch(pieces) for i in ids] == tokenizer.encode(text)


def test_ids_beyond_16_bits_are_kept(folder, tmp_path):
    corpus = open_corpus(data_config(folder), 270, tmp_path / "cache")
    corpus.tokenizer.save(tmp_path / "big.json")
    record = json.loads((tmp_path / "big.json").read_text())
    record["added_tokens"].append({**record["added_tokens"][0], "id": 70_000, "content": "grant", "special": False})
    (tmp_path / "big.json").write_text(json.dumps(record))
    big = open_corpus(data_config(folder, tokenizer=tmp_path / "big.json"), 80_000, tmp_path / "cache")
    if big.tokenizer.size > 1 << 16:  # some releases renumber added tokens
        assert big.stores[0].index["dtype"] == "<u4"
    assert texts_of(big.training, big.tokenizer) == TEXTS


def test_where_paths_lead(folder, tmp_path, monkeypatch):
    (folder / "more").mkdir()
    (folder / "more" / "x.txt").write_text("x")
    (folder / "README.md").write_text("no document")
    names = lambda *paths: [source.name for source in find_sources(paths)]
    everything = [*sorted(TEXTS), "more/x.txt"]
    assert sorted(names(str(folder))) == sorted(everything)
    assert names(str(folder / "*.txt")) == sorted(TEXTS)
    assert names(str(folder / "m*" / "*.txt")) == ["more/x.txt"]
    assert names(str(folder / "README.md")) == ["README.md"]  # named, so it is meant
    assert sorted(names(str(folder), str(folder / "polk.txt"))) == sorted(everything)  # no file twice
    monkeypatch.chdir(tmp_path)
    assert names("text/polk.txt") == ["polk.txt"]
    assert len(names("llm/data/text")) == 35  # of the repository
    (tmp_path / "llm" / "data" / "text").mkdir(parents=True)
    (tmp_path / "llm" / "data" / "text" / "own.txt").write_text("own")
    assert names("llm/data/text") == ["own.txt"]  # the current directory comes first
    (tmp_path / "[odd]").mkdir()
    (tmp_path / "[odd]" / "a.txt").write_text("a")
    assert names("[odd]") == ["a.txt"]
    monkeypatch.chdir("[odd]")
    assert names("*.txt") == ["a.txt"]


def test_jsonl(tmp_path):
    lines = [{"text": "first\ntext", "id": "a/1"}, {"text": "second ü"}, {"text": "third", "id": 0, "more": [1]}]
    raw = "\ufeff" + json.dumps(lines[0]) + "\r\n\n" + "\n".join(json.dumps(line, ensure_ascii=False) for line in lines[1:])
    (tmp_path / "d.jsonl").write_text(raw, newline="")
    corpus = open_corpus(data_config(tmp_path / "d.jsonl", held_out="a/1"), 270, tmp_path / "cache")
    assert texts_of(corpus.held_out, corpus.tokenizer) == {"d.jsonl:a/1": "first\ntext"}
    assert texts_of(corpus.training, corpus.tokenizer) == {"d.jsonl:3": "second ü", "d.jsonl:0": "third"}
    assert corpus.training.bytes == len("second üthird".encode())


def chosen(held_out, names):
    """The held-out ones of the documents of one source."""
    (held_D,) = choose_held_out(held_out, [Documents(names, np.array([digest(name) for name in names], np.uint64))])
    return [name for name, out in zip(names, held_D) if out]


NAMES = ["1961.txt", "more/1962.txt", "d.jsonl:1", "d.jsonl:22", "e.jsonl:1"]


@pytest.mark.parametrize(
    ("held_out", "expected"),
    [
        ("", []),
        ("0", []),
        ("1961*", ["1961.txt"]),
        ("*.txt", ["1961.txt", "more/1962.txt"]),
        ("1962.txt, e.jsonl:*", ["more/1962.txt", "e.jsonl:1"]),
        ("more/*", ["more/1962.txt"]),
        ("d.jsonl:*", ["d.jsonl:1", "d.jsonl:22"]),
        ("d.jsonl:1", ["d.jsonl:1"]),
    ],
)
def test_what_a_pattern_holds_out(held_out, expected):
    assert chosen(held_out, NAMES) == expected


def test_a_number_or_fraction_does_not_depend_on_the_order():
    names = [f"{i}.txt" for i in range(40)]
    pick = lambda held_out, names: set(chosen(held_out, names))
    assert len(pick("3", names)) == 3 and pick("3", names) == pick("3", names[::-1])
    assert pick("3", names) < pick("4", names) == pick("0.1", names)
    assert len(pick("0.001", names)) == 1


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ("nobody*", "matches none of the 5 documents, such as '1961.txt'"),
        ("5", "leaves nothing to train on: there are 5"),
        ("1961", "leaves nothing.*pattern on the name"),
        ("*", "leaves nothing"),
        ("-1", "a number of documents, a fraction below 1 or a pattern"),
        ("1.5", "a number of documents, a fraction below 1 or a pattern"),
    ],
)
def test_held_out_that_cannot_be(held_out, message):
    with pytest.raises(UserError, match=message):
        chosen(held_out, NAMES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text"),
        ("a.jsonl", b"", r"a\.jsonl is empty"),
        ("a.jsonl", b"\n \n", "there is no document in"),
        ("a.jsonl", b'{"text": "x"}\n{"text": }\n', r"a\.jsonl, line 2: not a JSONL document"),
        ("a.jsonl", b'{"text": "x"}\n["x"]\n', 'line 2.*"text" is a string'),
        ("a.jsonl", b'{"text": 3}', 'line 1.*"text" is a string'),
        ("a.jsonl", b'{"text": ""}', "line 1.*not empty"),
        ("a.jsonl", b'{"body": "x"}', 'line 1.*"text"'),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1.*surrogates"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}', "line 2.*utf-8"),
    ],
)
def test_sources_that_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        open_corpus(data_config(tmp_path / name), 270, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] in ([], [tmp_path / "cache" / "work"])


def test_refusals(folder, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match=r"data\.paths is empty"):
        open_corpus(data_config(), 270, cache)
    for path in ("nowhere", str(folder / "*.md"), str(tmp_path / "nowhere.txt")):
        with pytest.raises(UserError, match="no file, no folder and no pattern"):
            open_corpus(data_config(path), 270, cache)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(UserError, match=r"hollow' holds no \.txt and no \.jsonl"):
        open_corpus(data_config(tmp_path / "hollow"), 270, cache)
    with pytest.raises(UserError, match=r"no file.*tokenizer\.json"):
        open_corpus(data_config(folder, tokenizer="none.json"), 270, cache)
    corpus = open_corpus(data_config(folder), 270, cache)
    corpus.tokenizer.save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"outside model\.vocab=260"):
        open_corpus(data_config(folder, tokenizer=tmp_path / "tokenizer.json"), 260, cache)
    with pytest.raises(UserError, match=r"data\.held_out is ''"):
        corpus.held_out_batches(2, 16)
    with pytest.raises(UserError, match=r"do not fill one row of batch\.length=100000"):
        corpus.batch(0, 0, 2, 100_000)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be read or stored"):
        open_corpus(data_config(folder), 270, tmp_path / "file")


def test_a_source_that_changes_while_it_is_read_is_refused(folder, tmp_path, monkeypatch):
    original = Tokenizer.encode_batch

    def encode(self, texts):
        (folder / "polk.txt").write_text("changed meanwhile")
        return original(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode)
    with pytest.raises(UserError, match="changed while it was read"):
        open_corpus(data_config(folder), 270, tmp_path / "cache")


def test_the_bundled_text(bundled):
    assert (bundled.training.documents, bundled.held_out.documents) == (32, 3)
    assert 950_000 < bundled.training.bytes + bundled.held_out.bytes < 1_050_000
    assert 0.05 < bundled.held_out.bytes / (bundled.training.bytes + bundled.held_out.bytes) < 0.08
    for split in (bundled.training, bundled.held_out):
        for name, text in texts_of(split, bundled.tokenizer).items():
            assert text == (ROOT / "llm/data/text" / name).read_text(encoding="utf-8")
            assert text[-1] == "\n" and min(text[:-1]) >= " "
