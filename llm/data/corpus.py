"""The corpus of a run: text or tokenised folders, alone or mixed by weight, with documents held out for evaluation.

Text is tokenised once into a folder of the cache that is named by the hash of all it was made from (the content of the
sources, the tokenizer), so another input means another folder.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from llm.data import batches, sources
from llm.data.order import Mixture
from llm.data.store import KIND, Split, Store
from llm.data.tokenization import Facts, build_once, fingerprints, hash_of, locked, tokenise
from llm.data.tokenizer import Tokenizer
from parallel.errors import UserError

FORMAT = 1  # of what tokens and rows a text gives: a change makes every run one on another text


class Corpus:
    """Tokenizer, training and held-out documents, and the batches made of them.

    identity: a hash of all that the batches depend on. training, held_out: the documents of all sources, one source
    after the other. mixture: how their rows are drawn.
    """

    def __init__(self, identity: str, tokenizer: Tokenizer, parts: list[sources.Part], stores: list[Store], held_out: str):
        self.identity, self.tokenizer, self.stores = identity, tokenizer, stores
        documents = [sources.Documents(s.names, s.documents_D["digest"], part.name) for part, s in zip(parts, stores)]
        held = sources.choose_held_out(held_out, documents)
        self.training = Split([(store, ~held_D) for store, held_D in zip(stores, held)], tokenizer.end)
        self.held_out = Split(list(zip(stores, held)), tokenizer.end)
        last = np.cumsum([0, *((~held_D).sum() for held_D in held)])  # document that begins each source
        self.mixture = Mixture([p.name for p in parts], [p.weight for p in parts], self.training.starts_D[last])
        self.held_counts = [int(held_D.sum()) for held_D in held]

    def rows(self, length: int) -> int:
        """Number of rows of all sources together. Raises UserError when one is shorter than a row."""
        return sum(self.mixture.rows(length))

    def batch(self, seed: int, step: int, rows: int, length: int, which: np.ndarray | None = None) -> batches.Batch:
        """Batch of a step, or some of its rows: see `batches.training_batch`."""
        return batches.training_batch(self.training, seed, step, rows, length, which, self.mixture)

    def epochs(self, seed: int, step: int, rows: int, length: int) -> dict[str, float]:
        """How often the first `step` batches have gone through each source; the only source of data.paths has the name ''."""
        taken = self.mixture.taken(seed, step * rows)
        return {name: n / count for name, n, count in zip(self.mixture.names, taken, self.mixture.rows(length))}

    def describe(self, seed: int, steps: int, rows: int, length: int) -> dict[str, str]:
        """A line about each source: what it is and how often a run of `steps` goes through it."""
        lines = {}
        for place, (name, epochs) in enumerate(self.epochs(seed, steps, rows, length).items()):
            tokens = self.mixture.starts[place + 1] - self.mixture.starts[place]
            share = f"{self.mixture.shares[place]:.2%} of the rows, " if name else ""
            lines[f"data {name}".strip()] = (
                f"{share}{tokens:,} training tokens in {self.mixture.rows(length)[place]:,} rows, "
                f"{self.held_counts[place]:,} documents held out, {epochs:.3g} epochs in {steps:,} steps"
            )
        return lines

    def held_out_batches(self, rows: int, length: int) -> Iterator[batches.Batch]:
        """Every held-out document once: see `batches.held_out_batches`. Raises UserError when there is none."""
        if not self.held_out.documents:
            raise UserError(
                "data.held_out is '': no document is held out to evaluate on; set a number, a fraction or a pattern"
            )
        return batches.held_out_batches(self.held_out, rows, length)


class Text(NamedTuple):
    """Files that are still to be tokenised, and their fingerprints."""

    files: list[sources.Source]
    facts: list[Facts]


def open_corpus(data: Any, vocab: int, cache: str | os.PathLike) -> Corpus:
    """Open the corpus of `data` (paths or mixture, held_out, tokenizer), after building it in the folder `cache` if need be.

    data.tokenizer is the path of a tokenizer.json, or '' to take that of tokenised sources or, where there are none, to
    train one of `vocab` entries on the training documents. Safe when several processes call it at once. Raises UserError.
    """
    with _reading(cache := Path(cache)):
        found = _look(data, vocab, cache)
        tokenizer = found.tokenizer
        if tokenizer is None:
            tokenizer = _trained(cache, found.identity, found.parts, found.texts, str(data.held_out), vocab)
        stores = [source if isinstance(source, Store) else _tokenised(cache, source, tokenizer) for source in found.texts]
        return Corpus(found.identity, tokenizer, found.parts, stores, str(data.held_out))


def corpus_identity(data: Any, vocab: int, cache: str | os.PathLike) -> str:
    """The `identity` of the corpus that `open_corpus` gives, without building it. Raises UserError."""
    with _reading(cache := Path(cache)):
        return _look(data, vocab, cache).identity


class Found(NamedTuple):
    """What a corpus is made of; no tokenizer when one has to be trained."""

    identity: str
    tokenizer: Tokenizer | None
    parts: list[sources.Part]
    texts: list[Store | Text]


def _look(data: Any, vocab: int, cache: Path) -> Found:
    parts = sources.parse_sources(data.paths, data.mixture)
    given = Tokenizer.load(sources.locate(data.tokenizer), vocab) if data.tokenizer else None
    cache.mkdir(parents=True, exist_ok=True)
    found = [_find(part, cache) for part in parts]
    tokenizer = _agree(given, [source for source in found if isinstance(source, Store)], vocab)
    facts = [source.facts if isinstance(source, Text) else [source.identity] for source in found]
    mixed = [[part.name, part.weight] for part in parts] if data.mixture else []
    recipe = [FORMAT, *facts, *mixed, str(data.held_out), tokenizer.hash if tokenizer else vocab]
    identity = hash_of(recipe)[:24]
    return Found(identity, tokenizer, parts, found)


@contextlib.contextmanager
def _reading(cache: Path) -> Iterator[None]:
    try:
        yield
    except ChildProcessError:
        raise
    except OSError as error:
        place = error.filename or cache
        raise UserError(f"the corpus cannot be read or stored: {place}: {error.strerror or error}") from error


def _find(part: sources.Part, cache: Path) -> Store | Text:
    """The tokenised folder or the files of a source."""
    option = f"data.mixture: {part.name}" if part.name else "data.paths"
    folders = [path for path in part.paths if is_store(sources.locate(path))]
    if folders and len(part.paths) > 1:
        raise UserError(
            f"{option}: {folders[0]!r} is a tokenised folder and stands alone: mix it by data.mixture=NAME=PATH@WEIGHT"
        )
    if folders:
        return open_store(sources.locate(folders[0]))
    files = sources.find_sources(part.paths, option)
    return Text(files, fingerprints(files, cache / "sources.json"))


def is_store(folder: Path) -> bool:
    """Whether a folder looks like tokenised documents, whole or damaged."""
    try:
        return json.loads((folder / "index.json").read_text(encoding="utf-8")).get("kind") == KIND
    except (OSError, ValueError, AttributeError):
        return False


def open_store(folder: Path) -> Store:
    """Open a folder made by `tokenize`. Raises UserError when it is damaged."""
    try:
        return Store(folder)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is damaged ({error}): make it again with python main.py tokenize") from None


def _agree(given: Tokenizer | None, stores: list[Store], vocab: int) -> Tokenizer | None:
    """The tokenizer that is given or that tokenised sources have; all must have the same."""
    for store in stores:
        given = given or Tokenizer.load(store.folder / "tokenizer.json", vocab)
        if store.tokenizer.hash != given.hash:
            raise UserError(
                f"{store.folder} was tokenised with another tokenizer than the rest of the data (or data.tokenizer): "
                "make it again with that one, or take it out"
            )
    return given


def _trained(cache: Path, name: str, parts: list[sources.Part], found: list[Text], held_out: str, vocab: int) -> Tokenizer:
    """A tokenizer trained on the training documents, which the cache keeps."""
    path = cache / f"{name}.tokenizer.json"
    with locked(cache / "work"):
        if path.is_file():
            with contextlib.suppress(UserError):  # damaged: train it again
                return Tokenizer.load(path, vocab)
        documents = []
        for part, text in zip(parts, found):
            names = [name for name, _ in sources.documents(text.files)]
            if not names:
                raise UserError(f"there is no document in {', '.join(str(file.path) for file in text.files[:3])}")
            documents.append(sources.Documents(names, np.array([*map(sources.digest, names)], np.uint64), part.name))
        held = sources.choose_held_out(held_out, documents)
        logging.info("training a tokenizer of %d entries on %d documents", vocab, sum((~held_D).sum() for held_D in held))
        texts = ((held_D, sources.documents(text.files)) for held_D, text in zip(held, found))
        pieces = (piece for held_D, read in texts for out, (_, pieces) in zip(held_D, read) if not out for piece in pieces)
        tokenizer = Tokenizer.train(pieces, vocab)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        tokenizer.save(fresh)
        fresh.replace(path)
    return tokenizer


def _tokenised(cache: Path, text: Text, tokenizer: Tokenizer) -> Store:
    """The store of a text in the cache, made if need be."""
    folder = cache / hash_of([FORMAT, text.facts, tokenizer.hash])[:24]
    opened: list[Store] = []

    def is_done() -> bool:
        try:
            opened[:] = [Store(folder)]
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: build it
            return False
        return True

    if not is_done():
        work, stamps = cache / "work", cache / "sources.json"
        build = lambda: tokenise(work, *text, tokenizer, "memory_map", 0, stamps)
        build_once(folder, work, is_done, build)
        is_done()
    return opened[0]
