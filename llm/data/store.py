"""Tokenised documents in a folder, and `Split`, the documents chosen from one or several folders as one stream.

The folder holds index.json (what it was made from, sizes), tokenizer.json, documents.bin (a DOCUMENT for each), documents.names
(a JSON string a line) and the tokens, each document ended by the end of text, in files of one of two formats:

memory_map    tokens.NNNNN.bin: little-endian integers, read through memory maps
array_record  tokens.NNNNN.array_record, which grain reads, too: a record is a document as little-endian integers; a
              document of more than RECORD tokens goes on in the next records
"""

import bisect
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm.data.tokenizer import Tokenizer
from parallel.errors import UserError

FORMATS = ("memory_map", "array_record")
KIND = "tokenised documents"  # in index.json, to know such a folder by
DOCUMENT = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("digest", "<u8")])
RECORD = 1 << 16  # tokens of an ArrayRecord at most
MAPS = 256  # files that are kept open


class Names(Sequence[str]):
    """The names of documents, read from their file when the first is asked for."""

    def __init__(self, path: Path, count: int):
        self.path, self.count = path, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: Any) -> Any:
        return self._all[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    @functools.cached_property
    def _all(self) -> list[str]:
        with open(self.path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]


class Store:
    """An opened folder: documents_D (DOCUMENT), starts_D (int64 [documents + 1], places of the tokens), names,
    index, identity (a hash of what it was made from).

    Raises OSError, ValueError, KeyError or TypeError when it is not there or damaged, UserError without grain for ArrayRecord.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        text = (folder / "index.json").read_bytes()
        self.identity = hashlib.sha256(text).hexdigest()  # the index names sources and tokenizer by their hashes
        self.index: dict[str, Any] = json.loads(text)
        if self.index["kind"] != KIND:
            raise ValueError(f"{folder} holds no {KIND}")
        self.tokenizer = Tokenizer.load(folder / "tokenizer.json", self.index["size"])
        if self.tokenizer.hash != self.index["tokenizer"]:
            raise ValueError(f"{folder} holds another tokenizer than it was made with")
        self.documents_D = np.memmap(folder / "documents.bin", DOCUMENT, mode="r")
        self.starts_D = np.concatenate([[0], np.cumsum(self.documents_D["tokens"])]).astype(np.int64)
        self.names = Names(folder / "documents.names", len(self.documents_D))
        if (len(self.documents_D), int(self.starts_D[-1])) != (self.index["documents"], self.index["tokens"]):
            raise ValueError(f"{folder} does not have the documents that its index says")
        files = [(folder / name, tokens) for name, tokens in self.index["files"]]
        reader = _Records if self.index["format"] == "array_record" else _Maps
        self.read = reader(files, np.dtype(self.index["dtype"]), self.starts_D).read


class _Maps:
    """Reads tokens from plain files."""

    def __init__(self, files: list[tuple[Path, int]], dtype: np.dtype, _: np.ndarray):
        self.starts = np.cumsum([0, *(tokens for _, tokens in files)]).tolist()
        for path, tokens in files:
            if path.stat().st_size != tokens * dtype.itemsize:
                raise OSError(f"{path} does not have the size that its index says")
        self.map = functools.lru_cache(MAPS)(lambda number: np.asarray(np.memmap(files[number][0], dtype, mode="r")))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of all documents as int32."""
        parts = [np.zeros(0, np.int32)]
        number = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            last = min(stop, self.starts[number + 1])
            if start < last:  # a file without tokens has no map
                parts.append(self.map(number)[start - self.starts[number] : last - self.starts[number]])
            start, number = last, number + 1
        return np.concatenate(parts, dtype=np.int32, casting="unsafe")


class _Records:
    """Reads tokens from ArrayRecord files."""

    def __init__(self, files: list[tuple[Path, int]], dtype: np.dtype, starts_D: np.ndarray):
        self.dtype = dtype
        try:
            self.source = grain().sources.ArrayRecordDataSource([str(path) for path, _ in files])
        except RuntimeError as error:  # what the package raises for a file that is missing or cut
            raise OSError(str(error)) from error
        pieces_D = -(-np.diff(starts_D) // RECORD)
        inside_R = np.arange(pieces_D.sum()) - np.repeat(np.cumsum(pieces_D) - pieces_D, pieces_D)
        self.starts_R = np.append(np.repeat(starts_D[:-1], pieces_D) + inside_R * RECORD, starts_D[-1])
        if len(self.source) != len(inside_R):
            raise OSError(f"{files[0][0].parent} does not have the records that its index says")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of all documents as int32."""
        first, last = int(self.starts_R.searchsorted(start, "right")) - 1, int(self.starts_R.searchsorted(stop))
        data = b"".join(self.source[record] for record in range(first, last))
        skip = start - int(self.starts_R[first])
        return np.frombuffer(data, self.dtype)[skip : skip + stop - start].astype(np.int32)


def grain() -> Any:
    """The package grain. Raises UserError when it is not installed."""
    try:
        import grain
    except ImportError:
        raise UserError("ArrayRecord needs the package grain: pip install grain, or use --format=memory_map") from None
    return grain


class Split:
    """Chosen documents of one or several stores as one stream of tokens.

    documents, bytes (UTF-8, of the text), tokens (the ends of text included), scored (targets that count: all tokens
    but each document's first), names, starts_D (int64 [documents + 1], places in the stream), end (its id).
    """

    def __init__(self, parts: Sequence[tuple[Store, np.ndarray]], end: int):
        self.parts, self.end = parts, end
        tokens_D = np.concatenate([store.documents_D["tokens"][chosen_D] for store, chosen_D in parts])
        self.starts_D = np.concatenate([[0], np.cumsum(tokens_D)]).astype(np.int64)
        self.documents, self.tokens = len(tokens_D), int(self.starts_D[-1])
        self.bytes = sum(int(store.documents_D["bytes"][chosen_D].sum()) for store, chosen_D in parts)
        self.scored = self.tokens - self.documents
        store_R, from_R, size_R = [], [], []  # of the runs of documents that follow each other in their store, too
        for number, (store, chosen_D) in enumerate(parts):
            edges = np.flatnonzero(np.diff(chosen_D, prepend=False, append=False)).reshape(-1, 2)
            from_R.append(store.starts_D[edges[:, 0]])
            size_R.append(store.starts_D[edges[:, 1]] - from_R[-1])
            store_R.append(np.full(len(edges), number))
        self.store_R, self.from_R = np.concatenate(store_R), np.concatenate(from_R)
        self.starts_R = np.concatenate([[0], np.cumsum(np.concatenate(size_R))]).astype(np.int64)

    @property
    def names(self) -> list[str]:
        """The documents' names, in order."""
        return [name for store, chosen_D in self.parts for name, chosen in zip(store.names, chosen_D) if chosen]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream as int32."""
        parts = [np.zeros(0, np.int32)]
        run = int(self.starts_R.searchsorted(start, "right")) - 1
        while start < stop:
            last = min(stop, int(self.starts_R[run + 1]))
            place = int(self.from_R[run]) + start - int(self.starts_R[run])
            parts.append(self.parts[self.store_R[run]][0].read(place, place + last - start))
            start, run = last, run + 1
        return np.concatenate(parts)
