"""Documents from text files (one document each), folders, patterns and JSONL, read as a stream; which are held out."""

import fnmatch
import glob
import gzip
import hashlib
import importlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallel.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")  # taken from a folder
PIECE = 1 << 20  # characters of a document handed to the tokenizer at once
BLOCK = 1 << 24  # bytes read at once where only lines are counted
# A piece ends between a letter and " letter": no pre-token of a byte-level BPE crosses such a place.
_CUT = re.compile(r".*[^\W\d_](?= [^\W\d_])", re.DOTALL)


class Source(NamedTuple):
    """A file and the name that its documents go by, which does not depend on where the folder lies.

    Of plain JSONL it may be a part: the lines that begin in the bytes [start, stop), the first of which is number `line`.
    """

    name: str
    path: Path
    start: int = 0
    stop: int | None = None
    line: int = 1

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.start


def find_sources(paths: Iterable[str], option: str = "data.paths") -> list[Source]:
    """Files behind the paths of `option`: files, folders (what ends with one of SUFFIXES) and patterns, each file once.

    A relative path is looked up in the current directory first, then in the repository. Raises UserError.
    """
    found: dict[Path, Source] = {}
    for text in (paths,) if isinstance(paths, str) else paths:
        bases = _bases(text)
        files = next(filter(None, (_files(base, os.path.expanduser(text)) for base in bases)), None)
        if files is None:
            raise UserError(f"{option}: {_missing(text, bases)}")
        for source in files:
            found.setdefault(source.path.resolve(), source)
    if not found:
        raise UserError(f"{option} is empty: name text files, JSONL files, folders or patterns")
    return list(found.values())


def locate(path: str) -> Path:
    """The path in the current directory or, when there is nothing, in the repository."""
    places = [base / os.path.expanduser(path) for base in _bases(path)]
    return next((place for place in places if place.exists()), places[0])


def _bases(text: str) -> tuple[Path, ...]:
    return (Path("/"),) if os.path.isabs(os.path.expanduser(text)) else (Path.cwd(), ROOT)


def _files(base: Path, text: str) -> list[Source]:
    path, parts = base / text, Path(text).parts
    if path.is_file():
        return [Source(path.name, path)]
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root, pattern = (path, "**/*") if path.is_dir() else (base.joinpath(*parts[:fixed]), "/".join(parts[fixed:]))
    names = sorted(glob.glob(pattern, root_dir=root, recursive=True)) if pattern else []
    if path.is_dir():
        names = [name for name in names if name.endswith(SUFFIXES)]
    return [Source(name, root / name) for name in names if (root / name).is_file()]


def _missing(text: str, bases: tuple[Path, ...]) -> str:
    if any((base / text).is_dir() for base in bases):
        return f"the folder {text!r} holds no .txt and no .jsonl file (.jsonl.gz and .jsonl.zst are read, too)"
    looked = " and ".join(map(str, bases))
    return f"{text!r} is no file, no folder and no pattern that matches a file (looked in {looked})"


def documents(sources: Iterable[Source]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield (name, pieces of its text) of every document; the pieces are read as they are asked for.

    Names: the file's, or FILE:ID for a JSONL line with an "id", FILE:LINE for one without. Raises UserError.
    """
    for source in sources:
        if source.path.stat().st_size == 0:
            raise UserError(f"{source.path} is empty: remove it from the paths or put text into it")
        if source.path.name.endswith(SUFFIXES[1:]):
            yield from _read_jsonl(source)
        else:
            yield source.name, _cut(_read_text(source.path))


def _read_text(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while chunk := file.read(PIECE):
                yield chunk
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): convert it or take it out of the paths") from None


def _read_jsonl(source: Source) -> Iterator[tuple[str, Iterator[str]]]:
    for number, line in _lines(source):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
            if not isinstance(record, dict) or not isinstance(record.get("text"), str) or not record["text"]:
                raise ValueError('it must be an object whose "text" is a string that is not empty')
            record["text"].encode()  # JSON may hold half a surrogate pair, which no UTF-8 text can
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source.path}, line {number}: not a JSONL document ({error})") from None
        text, label = record["text"], record.get("id")
        name = f"{source.name}:{number if label is None else label}"
        yield name, _cut(text[first : first + PIECE] for first in range(0, len(text), PIECE))


def _lines(source: Source) -> Iterator[tuple[int, bytes]]:
    opener, damage = _reader(source.path)
    place = source.start
    try:
        with opener(source.path, "rb") as file:
            if place:
                file.seek(place)
            for number, line in enumerate(file, source.line):
                yield number, line
                place += len(line)
                if source.stop is not None and place >= source.stop:
                    return
    except damage as error:
        raise UserError(f"{source.path} is damaged or no {source.path.suffix} file ({error}): make or copy it again") from None


def _reader(path: Path) -> tuple[Callable, tuple[type[Exception], ...]]:
    """What opens a file, and the errors by which it tells that the file is damaged."""
    if path.suffix == ".gz":
        return gzip.open, (EOFError, zlib.error, gzip.BadGzipFile)
    if path.suffix == ".zst":
        try:
            zstd = importlib.import_module("compression.zstd")
        except ImportError:
            raise UserError(f"{path}: Python reads .zst from version 3.14 on: unpack the file, or pack it with gzip") from None
        return zstd.open, (EOFError, zstd.ZstdError)
    return open, ()


def divide(sources: Iterable[Source], size: int) -> list[list[Source]]:
    """The sources in order, in lists of about `size` bytes: small files together, plain JSONL cut between two lines."""
    units: list[list[Source]] = [[]]
    held = 0
    for source in sources:
        whole = source.path.suffix != ".jsonl" or source.size <= size
        for part in [source] if whole else _ranges(source, size):
            if held >= size:
                units.append([])
                held = 0
            units[-1].append(part)
            held += part.size
    return units


def _ranges(source: Source, size: int) -> Iterator[Source]:
    start, line = 0, 1
    with open(source.path, "rb") as file:
        while True:
            lines, left = 0, size
            while left and (block := file.read(min(left, BLOCK))):
                lines += block.count(b"\n")
                left -= len(block)
            lines += file.readline().count(b"\n")
            if file.tell() == start:
                return
            yield source._replace(start=start, stop=file.tell(), line=line)
            start, line = file.tell(), line + lines


def _cut(chunks: Iterable[str]) -> Iterator[str]:
    """Move the cuts between chunks of at most PIECE characters to where no token crosses, if there is such a place."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        if len(rest) >= PIECE:
            match = _CUT.match(rest)
            end = match.end() if match else len(rest)
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


class Part(NamedTuple):
    """A source of a mixture: its name, its weight and where it lies."""

    name: str
    paths: tuple[str, ...]
    weight: float


def parse_sources(paths: Sequence[str], mixture: Sequence[str]) -> list[Part]:
    """The sources of `data`: those of data.mixture, NAME=PATH@WEIGHT (or PATH:PATH@WEIGHT), or all of data.paths as one.

    Raises UserError when both or neither are given, or an entry cannot be read.
    """
    if not mixture:
        return [Part("", (paths,) if isinstance(paths, str) else tuple(paths), 1.0)]
    if paths:
        raise UserError("data.paths and data.mixture are both given: empty one of them, as in --config.data.paths=")
    parts = []
    for entry in mixture:
        match = re.fullmatch(r"\s*([\w.-]+)=(.+)@([^@]+)", entry)
        try:
            name, places, weight = match[1], tuple(filter(None, match[2].split(":"))), float(match[3])
        except (TypeError, ValueError):
            raise UserError(
                f"data.mixture: {entry!r} is not NAME=PATH@WEIGHT, such as speeches=text/speeches@0.7 (several paths: A:B)"
            ) from None
        if not (0 < weight < math.inf and places):
            raise UserError(f"data.mixture: the weight of {name} is {match[3]}: it must be a number above 0")
        if name in (part.name for part in parts):
            raise UserError(f"data.mixture names {name} twice: several paths of one source are written {name}=A:B@WEIGHT")
        parts.append(Part(name, places, weight))
    return parts


def digest(name: str) -> int:
    """64 bits of a name's hash, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass")).digest()[:8], "big")


class Documents(NamedTuple):
    """The documents of one source as far as the choice of held-out ones needs them."""

    names: Sequence[str]
    digest_D: np.ndarray  # uint64, of the names
    source: str = ""


def choose_held_out(held_out: str, sources: Sequence[Documents]) -> list[np.ndarray]:
    """Which documents are held out: for each source one bool a document.

    `held_out` is '' (none), a number of documents of each source ('3'), a fraction of them ('0.05'), or patterns on the
    name separated by commas ('1974*,test.jsonl:*'; a pattern may leave out the folders and the JSONL file; in a mixture
    a name begins with that of its source and a slash). A number or a fraction takes the documents whose names have the
    lowest hashes, so that the choice does not depend on order or machine. Raises UserError when nothing would be held
    out although something was asked, or nothing of a source would be left.
    """
    text = held_out.strip()
    patterns = [f"*[/:]{part.strip()}" for part in text.split(",")]
    chosen = []
    for names, digest_D, source in sources:
        held_D = np.zeros(len(names), bool)
        count = _count(text, len(names)) if text else 0
        if count is None:
            prefix = f"/{source}/" if source else "/"
            held_D[:] = [any(fnmatch.fnmatchcase(prefix + name, pattern) for pattern in patterns) for name in names]
        else:
            held_D[np.argsort(digest_D, kind="stable")[:count]] = True
        if held_D.all():
            raise UserError(
                f"data.held_out={held_out!r} leaves nothing{f' of {source}' if source else ''} to train on: there are "
                f"{len(names)} documents in all (a number is a count, 0.05 a fraction, anything else a pattern on the name "
                "such as '*1961*')"
            )
        chosen.append(held_D)
    if text and _count(text, 1) is None and not any(held_D.any() for held_D in chosen):
        total, example = sum(len(documents.names) for documents in sources), sources[0].names[0]
        raise UserError(f"data.held_out={held_out!r} matches none of the {total} documents, such as {example!r}")
    return chosen


def _count(text: str, documents: int) -> int | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if number < 0 or (number > 1 and number != int(number)):
        raise UserError(f"data.held_out={text!r} must be a number of documents, a fraction below 1 or a pattern on names")
    return max(1, round(number * documents)) if 0 < number < 1 else int(number)
