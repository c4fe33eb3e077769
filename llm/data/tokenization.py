"""Tokenising documents into a store: in several processes, whose number changes nothing in the result.

The sources are divided into units by their sizes alone. A process takes a unit, streams it through the tokenizer and
leaves its tokens, documents and names in the work folder, under a name that says all that they depend on; a killed
build that starts again finds those it has. When all are there they are put together and the folder is renamed: what has
the name of a store is a whole one.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from llm.data import sources, store
from llm.data.tokenizer import Tokenizer
from llm.signals import SIGNALS
from parallel.errors import UserError

UNIT = 16 << 20  # least bytes of text that a process takes at a time
UNITS = 1024  # more text makes larger units, not more of them
TOGETHER = 1 << 20  # characters that a thread tokenises at once
Facts = dict[str, Any]  # of a source: name, bytes, sha256


class Job(NamedTuple):
    """What makes a unit."""

    key: str
    sources: list[sources.Source]
    folder: Path
    format: str
    dtype: str


def fingerprints(files: list[sources.Source], stamps: Path) -> list[Facts]:
    """Name, bytes and hash of every source; a file that is as `stamps` says is not read again."""
    try:
        known = json.loads(stamps.read_text())
    except (OSError, ValueError):
        known = {}

    def one(source: sources.Source) -> tuple[Facts, tuple[str, list]]:
        status = os.stat(source.path)
        path, stamp = str(source.path.resolve()), [status.st_ctime_ns, status.st_size, status.st_ino]
        old = known.get(path, [None, ""])
        if old[0] == stamp:
            digest = old[1]
        else:
            with open(source.path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        # A younger file could change again within the clock's grain: it is read again the next time.
        entry = [stamp if time.time() - status.st_ctime > 2 else None, digest]
        return {"name": source.name, "bytes": status.st_size, "sha256": digest}, (path, entry)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing lets go of the interpreter
        facts, entries = zip(*threads.map(one, files))
    now = {path: entry for path, entry in entries if entry[0]}
    if any(known.get(path) != entry for path, entry in now.items()):
        fresh = stamps.with_name(f"{stamps.name}.{os.getpid()}")
        fresh.write_text(json.dumps({**known, **now}))
        fresh.replace(stamps)
    return list(facts)


def hash_of(value: Any) -> str:
    """A hash of plain JSON, such as the fingerprints of all sources."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@contextlib.contextmanager
def locked(work: Path) -> Iterator[None]:
    """One process at a time works in the folder `work`; the lock lies beside it."""
    work.parent.mkdir(parents=True, exist_ok=True)
    with open(lock_of(work), "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: all build the same, one is kept
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lock_of(work: Path) -> Path:
    """The file that is locked by whoever works in `work`."""
    return work.with_name(f"{work.name}.lock")


def build_once(folder: Path, work: Path, is_done: Callable[[], bool], build: Callable[[], None]) -> None:
    """Make `folder` by renaming what build() leaves in work / "store", unless another process has done it by then."""
    done = False
    with locked(work):
        try:
            done = is_done()
            if not done:
                build()
                shutil.rmtree(folder, ignore_errors=True)  # a damaged one
                (work / "store").rename(folder)
                done = True
        except OSError:
            done = is_done()
            if not done:
                raise
        finally:
            if done or not any((work / "units").glob("*.json")):
                shutil.rmtree(work, ignore_errors=True)


def tokenise(
    work: Path, files: list[sources.Source], facts: list[Facts], tokenizer: Tokenizer, format: str, workers: int, stamps: Path
) -> None:
    """Write the store of `files` to work / "store".

    facts: their fingerprints; format: one of store.FORMATS; workers: processes, 0: one a CPU; stamps: see `fingerprints`.
    Raises UserError on documents that cannot be read or a source that changed meanwhile.
    """
    dtype = "<u2" if tokenizer.size <= 1 << 16 else "<u4"
    units = work / "units"
    units.mkdir(parents=True, exist_ok=True)
    known = {source.path: fact for source, fact in zip(files, facts)}
    size = max(UNIT, sum(fact["bytes"] for fact in facts) // UNITS)
    jobs: dict[str, Job] = {}
    for part in sources.divide(files, size):
        recipe = [store.KIND, format, dtype, tokenizer.hash, [[known[s.path], s.start, s.stop, s.line] for s in part]]
        key = hash_of(recipe)[:24]
        while key in jobs:  # the same text again, under the same name in another folder
            key += "+"
        jobs[key] = Job(key, part, units, format, dtype)
    todo = [job for job in jobs.values() if not _is_done(job)]
    tokenizer.save(work / "tokenizer.json")
    sizes = {key: sum(source.size for source in job.sources) for key, job in jobs.items()}
    with Display(sum(sizes.values()), sum(sizes.values()) - sum(sizes[job.key] for job in todo)) as display:
        for job in _run(todo, work / "tokenizer.json", workers or os.cpu_count() or 1, display):
            display.add(sizes[job.key])
    _join(work, list(jobs.values()), facts, tokenizer)
    if fingerprints(files, stamps) != facts:
        shutil.rmtree(units)
        raise UserError("a source was changed while it was read: start again when nothing writes to it")


def _run(jobs: list[Job], tokenizer: Path, workers: int, display: "Display") -> Iterator[Job]:
    """Do the jobs; yield each when it is done."""
    if min(workers, len(jobs)) <= 1:  # the tokenizer's own threads are enough
        inner = Tokenizer.load(tokenizer, None)
        for job in jobs:
            _unit(job, inner, os.cpu_count() or 1, lambda tokens: display.show(display.tokens + tokens))
            yield job
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of jax's threads
    stop, tokens = context.Event(), context.Value("q", 0)
    processes = min(workers, len(jobs))
    setup = (tokenizer, max(1, workers // processes), stop, tokens)
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, _enter, setup)
    try:
        futures = {pool.submit(_in_process, job): job for job in jobs}
        waiting = set(futures)
        while waiting:
            done, waiting = concurrent.futures.wait(waiting, 0.5, concurrent.futures.FIRST_COMPLETED)
            for future in done:
                future.result()
                yield futures[future]
            display.show(tokens.value)
    except concurrent.futures.process.BrokenProcessPool:
        raise ChildProcessError(
            "a tokenising process was killed, perhaps for want of memory: the same command goes on; fewer --workers need less"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


_process: dict[str, Any] = {}


def _enter(tokenizer: Path, threads: int, stop: Any, tokens: Any) -> None:
    """Prepare a worker: its tokenizer, a share of the CPUs, and an end when the parent is no more."""
    for number in SIGNALS:  # launchers and terminals send them to all; it is for the parent to stop
        signal.signal(number, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _process.update(tokenizer=Tokenizer.load(tokenizer, None), threads=threads, stop=stop, tokens=tokens)


def _in_process(job: Job) -> None:
    def live(tokens: int) -> None:
        if _process["stop"].is_set():
            raise InterruptedError("another unit failed, or the command was stopped")
        with _process["tokens"].get_lock():
            _process["tokens"].value += tokens

    _unit(job, _process["tokenizer"], _process["threads"], live)


def _unit(job: Job, tokenizer: Tokenizer, threads: int, live: Callable[[int], None]) -> None:
    """Tokenise a unit; live(tokens that were added) is called every now and then."""
    paths = {kind: job.folder / f"{job.key}.{kind}.{os.getpid()}" for kind in ("tokens", "documents", "names", "json")}
    writer = (_Records if job.format == "array_record" else _Plain)(paths["tokens"], np.dtype(job.dtype))
    with open(paths["documents"], "wb") as documents, open(paths["names"], "w", encoding="utf-8") as names:

        def finish(name: str, tokens: int, size: int) -> None:
            writer.end(tokenizer.end)
            documents.write(np.array((tokens + 1, size, sources.digest(name)), store.DOCUMENT).tobytes())
            names.write(json.dumps(name) + "\n")

        current, name, tokens, size, total, count = -1, "", 0, 0, 0, 0
        for group in _together(sources.documents(job.sources), threads * TOGETHER):
            encoded = tokenizer.encode_batch([piece for _, _, piece in group])
            for (number, its_name, piece), ids in zip(group, encoded):
                if number != current:
                    if current >= 0:
                        finish(name, tokens, size)
                    current, name, tokens, size, count = number, its_name, 0, 0, count + 1
                writer.add(ids)
                tokens, size, total = tokens + len(ids), size + len(piece.encode()), total + len(ids)
            live(sum(map(len, encoded)))
        if current >= 0:
            finish(name, tokens, size)
        for file in (documents, names):
            file.flush()
            os.fsync(file.fileno())
    writer.close()
    paths["json"].write_text(json.dumps({"tokens": total + count, "documents": count}))
    for kind, path in paths.items():  # the last one says that all are there
        path.replace(job.folder / f"{job.key}.{kind}")


def _together(documents: Iterable[tuple[str, Iterator[str]]], most: int) -> Iterator[list[tuple[int, str, str]]]:
    """(document, name, piece) in lists of about `most` characters."""
    group, size = [], 0
    for number, (name, pieces) in enumerate(documents):
        for piece in pieces:
            group.append((number, name, piece))
            size += len(piece)
            if size >= most:
                yield group
                group, size = [], 0
    if group:
        yield group


class _Plain:
    """Writes tokens one after the other."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.file, self.dtype = open(path, "wb"), dtype  # noqa: SIM115

    def add(self, ids: list[int]) -> None:
        self.file.write(np.asarray(ids, self.dtype).tobytes())

    def end(self, token: int) -> None:
        self.add([token])

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class _Records:
    """Writes a record for every document, or several of store.RECORD tokens."""

    def __init__(self, path: Path, dtype: np.dtype):
        store.grain()
        from array_record.python.array_record_module import ArrayRecordWriter

        self.path, self.dtype = path, dtype
        self.file = ArrayRecordWriter(str(path), "group_size:1")  # groups of one are read at random
        self.held: list[int] = []

    def add(self, ids: list[int]) -> None:
        self.held += ids
        while len(self.held) > store.RECORD:
            self._write(store.RECORD)

    def end(self, token: int) -> None:
        self.add([token])
        self._write(len(self.held))

    def _write(self, count: int) -> None:
        self.file.write(np.asarray(self.held[:count], self.dtype).tobytes())
        del self.held[:count]

    def close(self) -> None:
        self.file.close()
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())


def _is_done(job: Job) -> bool:
    paths = {kind: job.folder / f"{job.key}.{kind}" for kind in ("tokens", "documents", "names", "json")}
    try:
        facts = json.loads(paths["json"].read_text())
        whole = paths["documents"].stat().st_size == facts["documents"] * store.DOCUMENT.itemsize
        size = paths["tokens"].stat().st_size
        whole &= size == facts["tokens"] * np.dtype(job.dtype).itemsize if job.format == "memory_map" else size > 0
        return whole and paths["names"].exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _join(work: Path, jobs: list[Job], facts: list[Facts], tokenizer: Tokenizer) -> None:
    """Put the units together as a store."""
    folder = work / "store"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    counts = [json.loads((job.folder / f"{job.key}.json").read_text()) for job in jobs]
    if not sum(count["documents"] for count in counts):
        raise UserError(f"there is no document in {', '.join(str(source.path) for source in jobs[0].sources[:3])}")
    for kind, name in (("documents", "documents.bin"), ("names", "documents.names")):
        with open(folder / name, "wb") as file:
            for job in jobs:
                with open(job.folder / f"{job.key}.{kind}", "rb") as unit:
                    shutil.copyfileobj(unit, file)
            file.flush()
            os.fsync(file.fileno())
    files = []
    for job, count in zip(jobs, counts):
        if count["tokens"]:
            suffix = "bin" if job.format == "memory_map" else "array_record"
            files.append((f"tokens.{len(files):05d}.{suffix}", count["tokens"]))
            (job.folder / f"{job.key}.tokens").rename(folder / files[-1][0])
    (work / "tokenizer.json").rename(folder / "tokenizer.json")
    index = {
        "kind": store.KIND,
        "format": jobs[0].format,
        "dtype": jobs[0].dtype,
        "documents": sum(count["documents"] for count in counts),
        "tokens": sum(count["tokens"] for count in counts),
        "files": files,
        "tokenizer": tokenizer.hash,
        "size": tokenizer.size,
        "sources": hash_of(facts),
    }
    with open(folder / "index.json", "w", encoding="utf-8") as file:
        json.dump(index, file)
        file.flush()
        os.fsync(file.fileno())


class Display:
    """How far it is: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, total: int, done: int):
        self.total, self.first, self.done, self.tokens = total, done, done, 0
        self.began = self.shown = time.monotonic()
        console = Console()
        self.bar = None
        if console.is_terminal:
            self.bar = Progress(BarColumn(bar_width=10), TextColumn("{task.description}"), console=console, transient=True)
            self.task = self.bar.add_task("tokenising", total=total, completed=done)

    def __enter__(self) -> "Display":
        if self.bar:
            self.bar.start()
        if self.first:
            print(f"{self.first / max(self.total, 1):.0%} was tokenised before")
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def add(self, size: int) -> None:
        """A unit of `size` bytes is done."""
        self.done += size
        self.show(self.tokens)

    def show(self, tokens: int) -> None:
        """`tokens` are done by now: show it, if it is time."""
        self.tokens, now = tokens, time.monotonic()
        seconds, fresh = max(now - self.began, 1e-9), self.done - self.first
        left = f", {(self.total - self.done) / fresh * seconds / 60:.0f} min left" if fresh else ""
        rate = f"{tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
        text = f"tokenised {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {rate}{left}"
        if self.bar:
            self.bar.update(self.task, completed=self.done, description=text)
        elif now - self.shown > 10:
            print(text, flush=True)
            self.shown = now
