"""A corpus on disk: tokenised once into memory-mapped shards with a JSON index, rebuilt when its input changes.

A folder of the cache is named by the hash of all it was made from (the content of the sources, the choice of held-out
documents, the tokenizer), so another input means another folder. It is built under another name and renamed when it is
complete: a killed build leaves nothing that could be taken for a corpus.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from llm.data import batches, sources
from llm.data.tokenizer import Tokenizer
from parallel.errors import UserError

FORMAT = 1  # of the folder: a change makes every cache build again
SHARD = 1 << 28  # tokens in a file
TOGETHER = 4 << 20  # characters tokenised at once


class Split:
    """Training or held-out documents as one stream of tokens in memory-mapped shards.

    documents, bytes (UTF-8, of the text), tokens (the ends of text included), scored (targets that count: all tokens
    but each document's first), names, starts_D (int64 [documents + 1], places in the stream), end (its id).
    """

    def __init__(self, folder: Path, facts: dict[str, Any], dtype: str, end: int):
        self.names: list[str] = facts["names"]
        self.end = end
        self.documents = len(self.names)
        self.bytes: int = sum(facts["bytes"])
        self.starts_D = np.concatenate([[0], np.cumsum(np.array(facts["tokens"], np.int64))]).astype(np.int64)
        self.tokens = int(self.starts_D[-1])
        self.scored = self.tokens - self.documents
        self.shard = facts["shard"]
        files = [folder / name for name in facts["files"]]
        if sum(file.stat().st_size for file in files) != self.tokens * np.dtype(dtype).itemsize:
            raise OSError(f"{folder} does not have the size that its index says")
        self.maps = [np.memmap(file, dtype, mode="r") for file in files]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream as int32."""
        parts = []
        while start < stop:
            number, first = divmod(start, self.shard)
            parts.append(self.maps[number][first : first + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


class Corpus:
    """Tokenizer, training and held-out documents, and the batches made of them."""

    def __init__(self, folder: Path):
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self.folder = folder
        self.sources: list[dict[str, Any]] = index["sources"]
        self.tokenizer = Tokenizer.load(folder / "tokenizer.json", index["size"])
        if self.tokenizer.hash != index["tokenizer"]:
            raise ValueError(f"{folder} holds another tokenizer than it was made with")
        self.training = Split(folder, index["training"], index["dtype"], self.tokenizer.end)
        self.held_out = Split(folder, index["held_out"], index["dtype"], self.tokenizer.end)

    def rows(self, length: int) -> int:
        """Number of rows of an epoch. Raises UserError when the corpus is shorter than one row."""
        return batches.count_rows(self.training, length)

    def batch(self, seed: int, step: int, rows: int, length: int, which: np.ndarray | None = None) -> batches.Batch:
        """Batch of a step, or some of its rows: see `batches.training_batch`."""
        return batches.training_batch(self.training, seed, step, rows, length, which)

    def held_out_batches(self, rows: int, length: int) -> Iterator[batches.Batch]:
        """Every held-out document once: see `batches.held_out_batches`. Raises UserError when there is none."""
        if not self.held_out.documents:
            raise UserError(
                "data.held_out is '': no document is held out to evaluate on; set a number, a fraction or a pattern"
            )
        return batches.held_out_batches(self.held_out, rows, length)


def open_corpus(data: Any, vocab: int, cache: str | os.PathLike) -> Corpus:
    """Open the corpus of `data` (paths, held_out, tokenizer), after building it under the folder `cache` if need be.

    data.tokenizer is the path of a tokenizer.json, or '' to train one of `vocab` entries on the training documents.
    Safe when several processes call it at once. Raises UserError.
    """
    cache = Path(cache)
    given = Tokenizer.load(_locate(data.tokenizer), vocab) if data.tokenizer else None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        files = sources.find_sources(data.paths)
        facts = _fingerprint(files, cache / "sources.json")
        recipe = [FORMAT, facts, str(data.held_out), given.hash if given else vocab]
        folder = cache / hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:24]
        corpus = _open(folder)
        if corpus is None:
            _build_once(folder, lambda work: _build(work, files, facts, str(data.held_out), given, vocab))
            corpus = Corpus(folder)
    except OSError as error:
        place = error.filename or cache
        raise UserError(f"the corpus cannot be read or stored: {place}: {error.strerror or error}") from error
    return corpus


def _locate(path: str) -> Path:
    here = Path(path).expanduser()
    there = sources.ROOT / here
    return there if there.exists() and not here.exists() else here


def _fingerprint(files: list[sources.Source], stamps: Path) -> list[dict[str, Any]]:
    """Name, bytes and hash of every source; a file that is as `stamps` says is not read again."""
    try:
        known = json.loads(stamps.read_text())
    except (OSError, ValueError):
        known = {}
    facts, now = [], {}
    for source in files:
        status = os.stat(source.path)
        path, stamp = str(source.path.resolve()), [status.st_ctime_ns, status.st_size, status.st_ino]
        old = known.get(path, [None, ""])
        if old[0] == stamp:
            digest = old[1]
        else:
            with open(source.path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time() - status.st_ctime > 2:  # a younger file could change again within the clock's grain
            now[path] = [stamp, digest]
        facts.append({"name": source.name, "bytes": status.st_size, "sha256": digest})
    if any(known.get(path) != value for path, value in now.items()):
        fresh = stamps.with_name(f"{stamps.name}.{os.getpid()}")
        fresh.write_text(json.dumps({**known, **now}))
        fresh.replace(stamps)
    return facts


def _open(folder: Path) -> Corpus | None:
    try:
        return Corpus(folder)
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: build it
        return None


def _build_once(folder: Path, build) -> None:
    """Run build(work folder) and rename its result to `folder`, unless another process has done it by then."""
    with open(folder.with_suffix(".lock"), "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: both build, one is kept
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.parent.glob(f"{folder.name}.work*"):  # of killed builds: the lock is ours
                shutil.rmtree(left, ignore_errors=True)
        if _open(folder) is not None:
            return
        work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.work", dir=folder.parent))
        try:
            build(work)
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            try:
                work.rename(folder)
            except OSError:
                if _open(folder) is None:
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _build(
    work: Path,
    files: list[sources.Source],
    facts: list[dict[str, Any]],
    held_out: str,
    tokenizer: Tokenizer | None,
    vocab: int,
) -> None:
    names = [name for name, _ in sources.documents(files)]
    if not names:
        raise UserError(f"data.paths: there is no document in {', '.join(str(file.path) for file in files[:3])}")
    held = sources.choose_held_out(held_out, names)
    if tokenizer is None:
        logging.info("training a tokenizer of %d entries on %d documents", vocab, len(names) - sum(held))
        training = (pieces for out, (_, pieces) in zip(held, sources.documents(files)) if not out)
        tokenizer = Tokenizer.train(itertools.chain.from_iterable(training), vocab)
    tokenizer.save(work / "tokenizer.json")
    dtype = "<u2" if tokenizer.size <= 1 << 16 else "<u4"
    logging.info("tokenising %d documents", len(names))
    writers = [_Writer(work, name, dtype, tokenizer.end) for name in ("training", "held_out")]
    last = -1
    for group in _together(files, held):
        for (number, name, piece), ids in zip(group, tokenizer.encode_batch([piece for _, _, piece in group])):
            writer = writers[held[number]]
            if number != last:
                writer.begin(name)
                last = number
            writer.add(ids, len(piece.encode()))
    index = {"format": FORMAT, "sources": facts, "tokenizer": tokenizer.hash, "size": tokenizer.size, "dtype": dtype}
    index |= {writer.name: writer.close() for writer in writers}
    if _fingerprint(files, work.parent / "sources.json") != facts:
        raise UserError("data.paths: a file was changed while it was read: start again when nothing writes to it")
    with open(work / "index.json", "w", encoding="utf-8") as file:
        json.dump(index, file)
        os.fsync(file.fileno())


def _together(files: list[sources.Source], held: list[bool]) -> Iterator[list[tuple[int, str, str]]]:
    """(document, name, piece) in lists long enough to be tokenised in parallel and short enough for the memory."""
    group, size = [], 0
    for number, (_, (name, pieces)) in enumerate(zip(held, sources.documents(files))):
        for piece in pieces:
            group.append((number, name, piece))
            size += len(piece)
            if size >= TOGETHER:
                yield group
                group, size = [], 0
    yield group


class _Writer:
    """Writes the documents of one split into shards and collects what the index says of them."""

    def __init__(self, folder: Path, name: str, dtype: str, end: int):
        self.folder, self.name, self.dtype, self.end = folder, name, dtype, end
        self.facts: dict[str, Any] = {"shard": SHARD, "files": [], "names": [], "tokens": [], "bytes": []}
        self.room = 0
        self.file: Any = None

    def begin(self, name: str) -> None:
        self._finish()
        for key, value in (("names", name), ("tokens", 0), ("bytes", 0)):
            self.facts[key].append(value)

    def add(self, ids: list[int], size: int) -> None:
        self.facts["tokens"][-1] += len(ids)
        self.facts["bytes"][-1] += size
        array = np.asarray(ids, self.dtype)
        while len(array):
            if not self.room:
                self._close()
                self.facts["files"].append(f"{self.name}.{len(self.facts['files']):05d}.bin")
                self.file = open(self.folder / self.facts["files"][-1], "wb")  # noqa: SIM115
                self.room = SHARD
            self.file.write(array[: self.room].tobytes())
            array, self.room = array[self.room :], max(0, self.room - len(array))

    def close(self) -> dict[str, Any]:
        self._finish()
        self._close()
        return self.facts

    def _finish(self) -> None:
        if self.facts["names"]:
            self.add([self.end], 0)

    def _close(self) -> None:
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
