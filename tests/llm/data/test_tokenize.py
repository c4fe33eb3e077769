"""Tokenised folders: the same from any number of processes, killed and gone on with, read in training; both formats."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from llm.commandline import dispatch
from llm.data import sources, store, tokenization
from llm.data.corpus import open_corpus
from llm.data.sources import ROOT, divide, documents, find_sources
from llm.data.tokenizer import Tokenizer
from llm.tokenize import tokenize
from main import COMMANDS
from parallel.errors import UserError
from tests.llm.data.small import data_config
from tests.llm.data.test_batches import assert_same


def words(seed, count):
    picker = random.Random(seed)
    return " ".join(picker.choice(("union", "state", "of", "the", "naïve", "日本", "speech\n", "1961")) for _ in range(count))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with every kind of source."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(5):
        (folder / f"{i}.txt").write_text(words(i, 30 + 200 * i))
    lines = [json.dumps({"text": words(100 + i, 5 + i % 40)} | ({"id": f"n{i}"} if i % 3 else {})) for i in range(300)]
    (folder / "many.jsonl").write_text("\n".join(lines[:200]) + "\n\n" + lines[200] + "\n")
    with gzip.open(folder / "packed.jsonl.gz", "wt") as file:
        file.write("\n".join(lines[201:]))
    return folder


@pytest.fixture(scope="module")
def tokenizer(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train([words(i, 400) for i in range(3)], 300).save(path)
    return path


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def make(text, tokenizer, output, **how):
    return tokenize([str(text)], str(tokenizer), output, **how)


@pytest.fixture(scope="module")
def made(text, tokenizer, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "tokens"
    make(text, tokenizer, output, workers=1)
    return output


def test_every_document_is_there_once(text, tokenizer, made):
    opened, model = store.Store(made), Tokenizer.load(tokenizer, None)
    expected = [(name, "".join(pieces)) for name, pieces in documents(find_sources([str(text)]))]
    assert len(expected) == 305 and list(opened.names) == [name for name, _ in expected]
    for (_, its_text), start, stop in zip(expected, opened.starts_D, opened.starts_D[1:]):
        assert opened.read(start, stop).tolist() == [*model.encode(its_text), model.end]
    assert opened.documents_D["bytes"].tolist() == [len(its_text.encode()) for _, its_text in expected]
    assert opened.documents_D["digest"].tolist() == [sources.digest(name) for name, _ in expected]
    assert not made.with_name("tokens.work").exists() and list(made.parent.iterdir()) == [made]


@pytest.mark.smoke
def test_the_number_of_processes_changes_nothing(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "UNIT", 6000)
    results = {workers: make(text, tokenizer, tmp_path / str(workers), workers=workers) for workers in (1, 2, 3)}
    assert results[1]["files"] > 4
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "3")
    assert results[1]["tokens"] == results[2]["tokens"] == int(store.Store(tmp_path / "1").starts_D[-1])
    assert not list(tmp_path.glob("*.work*"))


@pytest.mark.parametrize("size", [1, 3000, 1 << 20])
def test_units_hold_every_document_in_order(text, size):
    files = find_sources([str(text)])
    units = divide(files, size)
    read = [(name, "".join(pieces)) for unit in units for name, pieces in documents(unit)]
    assert read == [(name, "".join(pieces)) for name, pieces in documents(files)]
    assert len(units) == {1: 207, 3000: 16, 1 << 20: 1}[size]
    assert all(sum(source.size for source in unit[:-1]) < size for unit in units)


def test_units_of_crlf_and_long_lines(tmp_path):
    lines = [json.dumps({"text": "x" * n}) for n in (1, 5000, 2, 3)]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode())
    (unit,) = [divide(find_sources([str(tmp_path / "a.jsonl")]), size) for size in (20,)]
    assert [[name for name, _ in documents(part)] for part in unit] == [["a.jsonl:1", "a.jsonl:2"], ["a.jsonl:3", "a.jsonl:4"]]


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from llm.data import tokenization
from llm.tokenize import tokenize
tokenization.UNIT = 6000
left = [4]
original = tokenization.Display.add
def add(self, size):
    original(self, size)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
tokenization.Display.add = add
if __name__ == "__main__":
    tokenize([sys.argv[2]], sys.argv[3], sys.argv[4], workers=int(sys.argv[5]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_gone_on_with(text, tokenizer, tmp_path, monkeypatch, capsys, workers):
    script, output = tmp_path / "killed.py", tmp_path / "tokens"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(ROOT), str(text), str(tokenizer), str(output), str(workers)]
    process = subprocess.Popen(command, start_new_session=True)
    assert process.wait(60) == -signal.SIGKILL and not output.exists()
    units = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "tokens.work" / "units").glob("*.tokens")}
    assert len(units) >= 4
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # the processes of a killed parent end, too
        try:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        except ProcessLookupError:
            break
    else:
        pytest.fail("a process outlived its parent")
    monkeypatch.setattr(tokenization, "UNIT", 6000)
    done = []
    original = tokenization._unit
    monkeypatch.setattr(tokenization, "_unit", lambda job, *rest: (done.append(job.key), original(job, *rest)))
    make(text, tokenizer, output, workers=1)
    assert "was tokenised before" in capsys.readouterr().out
    assert done and not {f"{key}.tokens" for key in done} & set(units)
    make(text, tokenizer, tmp_path / "whole", workers=1)
    assert files_of(output) == files_of(tmp_path / "whole")


def test_the_same_file_twice(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "UNIT", 1)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "4.txt").write_bytes((text / "4.txt").read_bytes())
    paths = [str(text / "4.txt"), str(tmp_path / "again" / "4.txt")]
    result = tokenize(paths, str(tokenizer), tmp_path / "tokens", workers=1)
    opened, half = store.Store(tmp_path / "tokens"), result["tokens"] // 2
    assert result["documents"] == 2 and np.array_equal(opened.read(0, half), opened.read(half, 2 * half))


def test_a_bad_line_keeps_what_was_done(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "UNIT", 6000)
    (tmp_path / "text").mkdir()
    for path in text.iterdir():
        (tmp_path / "text" / path.name).write_bytes(path.read_bytes())
    bad = tmp_path / "text" / "zz.jsonl"
    bad.write_text('{"text": "good"}\n{"text": 1}\n')
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"zz\.jsonl, line 2: not a JSONL document"):
            make(tmp_path / "text", tokenizer, tmp_path / "tokens", workers=workers)
    assert len(list((tmp_path / "tokens.work" / "units").glob("*.json"))) >= 4 and not (tmp_path / "tokens").exists()
    bad.write_text('{"text": "good"}\n')
    assert make(tmp_path / "text", tokenizer, tmp_path / "tokens", workers=1)["documents"] == 306


def test_a_process_that_dies_is_one_sentence(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "UNIT", 6000)
    kill = lambda display, tokens: [child.kill() for child in multiprocessing.active_children()]
    monkeypatch.setattr(tokenization.Display, "show", kill)
    with pytest.raises(ChildProcessError, match="was killed, perhaps for want of memory: the same command goes on"):
        make(text, tokenizer, tmp_path / "tokens", workers=2)


def test_training_reads_a_tokenised_folder(text, tokenizer, made, tmp_path):
    plain = open_corpus(data_config(text, held_out="0.1", tokenizer=tokenizer), 300, tmp_path / "cache")
    folder = open_corpus(data_config(made, held_out="0.1"), 300, tmp_path / "cache")
    assert folder.held_out.names == plain.held_out.names and len(folder.held_out.names) == 30
    assert_same(folder.batch(3, 11, 8, 16), plain.batch(3, 11, 8, 16))
    for ours, theirs in zip(folder.held_out_batches(4, 16), plain.held_out_batches(4, 16), strict=True):
        assert_same(ours, theirs)
    assert folder.tokenizer.hash == plain.tokenizer.hash and folder.identity != plain.identity
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [plain.stores[0].folder.name]
    mixed = data_config(mixture=(f"a={made}@1", f"b={text}/*.txt@1"))
    assert open_corpus(mixed, 300, tmp_path / "cache").tokenizer.hash == plain.tokenizer.hash


def test_folders_that_are_refused(text, tokenizer, made, tmp_path):
    Tokenizer.train([words(9, 400)], 290).save(tmp_path / "other.json")
    cases = [
        (data_config(made, text), "stands alone"),
        (data_config(made, tokenizer=tmp_path / "other.json"), "tokenised with another tokenizer"),
    ]
    for config, message in cases:
        with pytest.raises(UserError, match=message):
            open_corpus(config, 300, tmp_path / "cache")
    with pytest.raises(UserError, match=r"outside model\.vocab=280"):
        open_corpus(data_config(made), 280, tmp_path / "cache")
    (tmp_path / "harmed").mkdir()
    for name, content in files_of(made).items():
        (tmp_path / "harmed" / name).write_bytes(content[: -2 if name.endswith(".bin") else None])
    with pytest.raises(UserError, match=r"harmed is damaged .*make it again"):
        open_corpus(data_config(tmp_path / "harmed"), 300, tmp_path / "cache")


def test_calls_that_are_refused(text, tokenizer, made, tmp_path):
    new = tmp_path / "new"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("a")
    (tmp_path / "cut.jsonl.gz").write_bytes((text / "packed.jsonl.gz").read_bytes()[:-50])
    (tmp_path / "none.jsonl.gz").write_text('{"text": "not packed"}')
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    cases = [
        (dict(paths=[]), "--paths is empty"),
        (dict(paths=["nowhere"]), "--paths: 'nowhere' is no file"),
        (dict(paths=[str(made)]), "tokenised already"),
        (dict(tokenizer=""), "needs --tokenizer"),
        (dict(tokenizer="none.json"), "--tokenizer: '.*none.json' is no file"),
        (dict(tokenizer=str(text / "0.txt")), "is not a tokenizer.json"),
        (dict(output=""), "needs --output"),
        (dict(output=tmp_path / "full"), "holds something else"),
        (dict(output=text / "0.txt"), "holds something else"),
        (dict(output=made, paths=[str(text / "0.txt")]), "holds other text"),
        (dict(output=text / "0.txt" / "x"), "cannot be read or written"),
        (dict(workers=-1), "--workers=-1"),
        (dict(format="parquet"), "--format=parquet: the formats are memory_map and array_record"),
        (dict(paths=[str(tmp_path / "cut.jsonl.gz")]), "cut.jsonl.gz is damaged or no .gz file"),
        (dict(paths=[str(tmp_path / "none.jsonl.gz")]), "is damaged or no .gz file"),
        (dict(paths=[str(tmp_path / "binary.txt")]), "is not UTF-8 text"),
    ]
    if sys.version_info < (3, 14):
        (tmp_path / "a.jsonl.zst").write_bytes(b"x")
        cases.append((dict(paths=[str(tmp_path / "a.jsonl.zst")]), "reads .zst from version 3.14"))
    for change, message in cases:
        call = dict(paths=[str(text)], tokenizer=str(tokenizer), output=new) | change
        with pytest.raises(UserError, match=message) as caught:
            tokenize(**call)
        assert "\n" not in str(caught.value)
    assert not new.exists() and not list(tmp_path.glob("*.work"))
    before = files_of(made)
    assert make(text, tokenizer, made)["documents"] == 305 and files_of(made) == before  # it was ready


def test_the_command(text, tokenizer, tmp_path, capsys):
    line = ["tokenize", f"--paths={text}/0.txt,{text}/1.txt", f"--tokenizer={tokenizer}", f"--output={tmp_path}/tokens"]
    assert dispatch(COMMANDS, [*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    keys = ["output", "documents", "tokens", "bytes", "files", "format", "tokenizer", "wall_s"]
    assert list(document) == keys and document["documents"] == 2
    assert dispatch(COMMANDS, line) == 0
    assert f"--config.data.paths={tmp_path}/tokens" in capsys.readouterr().out
    assert dispatch(COMMANDS, [*line, "--workers=many"]) == 2
    assert dispatch(COMMANDS, [*line[:2], line[3]]) == 2
    assert "needs --tokenizer" in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python reads .zst from version 3.14 on")
def test_zst(text, tokenizer, tmp_path):
    from compression import zstd

    (tmp_path / "many.jsonl.zst").write_bytes(zstd.compress((text / "many.jsonl").read_bytes()))
    result = make(tmp_path / "many.jsonl.zst", tokenizer, tmp_path / "tokens")
    assert result["documents"] == 201


@pytest.fixture(scope="module")
def records(text, tokenizer, tmp_path_factory):
    pytest.importorskip("grain", reason="the package grain is not installed")
    output = tmp_path_factory.mktemp("records") / "tokens"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "RECORD", 100)  # the longest documents go over several records
        patch.setattr(tokenization, "UNIT", 6000)
        make(text, tokenizer, output, workers=1, format="array_record")
    return output


class TestArrayRecord:
    """The grain format: other files, the same rows."""

    def test_the_same_rows_in_the_same_order(self, records, made, tmp_path, monkeypatch):
        monkeypatch.setattr(store, "RECORD", 100)
        mapped, recorded = (open_corpus(data_config(f, held_out="0.1"), 300, tmp_path) for f in (made, records))
        for step in (0, 5, 40):
            assert_same(recorded.batch(3, step, 8, 16), mapped.batch(3, step, 8, 16))
        for ours, theirs in zip(recorded.held_out_batches(4, 16), mapped.held_out_batches(4, 16), strict=True):
            assert_same(ours, theirs)
        whole = recorded.stores[0]
        assert np.array_equal(whole.read(0, int(whole.starts_D[-1])), mapped.stores[0].read(0, int(whole.starts_D[-1])))

    def test_grain_reads_a_record_a_document(self, text, tokenizer, made, tmp_path):
        grain = pytest.importorskip("grain", reason="the package grain is not installed")
        make(text, tokenizer, tmp_path / "tokens", format="array_record")
        source = grain.sources.ArrayRecordDataSource(
            [str(path) for path in sorted((tmp_path / "tokens").glob("*.array_record"))]
        )
        opened = store.Store(made)
        assert len(source) == 305
        for place in (0, 17, 304):
            expected = opened.read(int(opened.starts_D[place]), int(opened.starts_D[place + 1]))
            assert np.frombuffer(source[place], "<u2").tolist() == expected.tolist()

    def test_damage_is_found(self, records, tmp_path):
        (tmp_path / "harmed").mkdir()
        for name, content in files_of(records).items():
            if not name.startswith("tokens.00001"):
                (tmp_path / "harmed" / name).write_bytes(content)
        with pytest.raises(UserError, match="harmed is damaged"):
            open_corpus(data_config(tmp_path / "harmed"), 300, tmp_path / "cache")

    def test_without_grain(self, text, tokenizer, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "grain", None)
        with pytest.raises(UserError, match="pip install grain"):
            make(text, tokenizer, tmp_path / "tokens", format="array_record")


def test_a_grain_pipeline_can_read_the_rows(made, tmp_path):
    """The recipe of docs/data.md."""
    grain = pytest.importorskip("grain", reason="the package grain is not installed")
    corpus = open_corpus(data_config(made), 300, tmp_path)
    rows = grain.MapDataset.range(24).map(lambda i: corpus.batch(0, i // 8, 8, 16, np.array([i % 8]))["tokens"][0])
    assert np.array_equal(np.stack(list(rows.batch(8)[1])), corpus.batch(0, 1, 8, 16)["tokens"])
