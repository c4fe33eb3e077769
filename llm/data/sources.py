"""Documents from text files (one document each), folders, patterns and JSONL, read as a stream; which are held out."""

import fnmatch
import glob
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from parallel.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PIECE = 1 << 20  # characters of a document handed to the tokenizer at once
# A piece ends between a letter and " letter": no pre-token of a byte-level BPE crosses such a place.
_CUT = re.compile(r".*[^\W\d_](?= [^\W\d_])", re.DOTALL)


class Source(NamedTuple):
    """A file and the name that its documents go by, which does not depend on where the folder lies."""

    name: str
    path: Path

    @property
    def is_jsonl(self) -> bool:
        return self.path.suffix == ".jsonl"


def find_sources(paths: Iterable[str]) -> list[Source]:
    """Files behind `data.paths`: files, folders (their *.txt and *.jsonl) and patterns, each file once.

    A relative path is looked up in the current directory first, then in the repository. Raises UserError.
    """
    found: dict[Path, Source] = {}
    for text in (paths,) if isinstance(paths, str) else paths:
        text = os.path.expanduser(text)
        bases = (Path("/"),) if os.path.isabs(text) else (Path.cwd(), ROOT)
        files = next(filter(None, (_files(base, text) for base in bases)), None)
        if files is None:
            raise UserError(f"data.paths: {_missing(text, bases)}")
        for source in files:
            found.setdefault(source.path.resolve(), source)
    if not found:
        raise UserError("data.paths is empty: name text files, JSONL files, folders or patterns")
    return list(found.values())


def _files(base: Path, text: str) -> list[Source]:
    path, parts = base / text, Path(text).parts
    if path.is_file():
        return [Source(path.name, path)]
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root, pattern = (path, "**/*") if path.is_dir() else (base.joinpath(*parts[:fixed]), "/".join(parts[fixed:]))
    names = sorted(glob.glob(pattern, root_dir=root, recursive=True)) if pattern else []
    if path.is_dir():
        names = [name for name in names if name.endswith((".txt", ".jsonl"))]
    return [Source(name, root / name) for name in names if (root / name).is_file()]


def _missing(text: str, bases: tuple[Path, ...]) -> str:
    if any((base / text).is_dir() for base in bases):
        return f"the folder {text!r} holds no .txt and no .jsonl file"
    looked = " and ".join(map(str, bases))
    return f"{text!r} is no file, no folder and no pattern that matches a file (looked in {looked})"


def documents(sources: Iterable[Source]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield (name, pieces of its text) of every document; the pieces are read as they are asked for.

    Names: the file's, or FILE:ID for a JSONL line with an "id", FILE:LINE for one without. Raises UserError.
    """
    for source in sources:
        if source.path.stat().st_size == 0:
            raise UserError(f"{source.path} is empty: remove it from data.paths or put text into it")
        if source.is_jsonl:
            yield from _read_jsonl(source)
        else:
            yield source.name, _cut(_read_text(source.path))


def _read_text(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while chunk := file.read(PIECE):
                yield chunk
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): convert it or take it out of data.paths") from None


def _read_jsonl(source: Source) -> Iterator[tuple[str, Iterator[str]]]:
    with open(source.path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
                if not isinstance(record, dict) or not isinstance(record.get("text"), str) or not record["text"]:
                    raise ValueError('it must be an object whose "text" is a string that is not empty')
                record["text"].encode()  # JSON may hold half a surrogate pair, which no UTF-8 text can
            except ValueError as error:
                raise UserError(f"{source.path}, line {number}: not a JSONL document ({error})") from None
            text, label = record["text"], record.get("id")
            name = f"{source.name}:{number if label is None else label}"
            yield name, _cut(text[first : first + PIECE] for first in range(0, len(text), PIECE))


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


def choose_held_out(held_out: str, names: list[str]) -> list[bool]:
    """Which of the documents are held out: one bool a name.

    `held_out` is '' (none), a number of documents ('3'), a fraction of them ('0.05'), or patterns on the name separated
    by commas ('1974*,test.jsonl:*'; a pattern may leave out the folders and the JSONL file). A number or a fraction
    takes the documents whose names have the lowest hashes, so that the choice does not depend on order or machine.
    Raises UserError when nothing would be held out although something was asked, or nothing would be left.
    """
    text = held_out.strip()
    count = _count(text, len(names)) if text else 0
    if count == 0:
        return [False] * len(names)
    if count is None:
        patterns = [f"*[/:]{part.strip()}" for part in text.split(",")]
        chosen = [any(fnmatch.fnmatchcase("/" + name, pattern) for pattern in patterns) for name in names]
    else:
        order = sorted(range(len(names)), key=lambda i: hashlib.blake2b(names[i].encode("utf-8", "surrogatepass")).digest())
        lowest = set(order[:count])
        chosen = [i in lowest for i in range(len(names))]
    if not any(chosen):
        raise UserError(f"data.held_out={held_out!r} matches none of the {len(names)} documents, such as {names[0]!r}")
    if all(chosen):
        raise UserError(
            f"data.held_out={held_out!r} leaves nothing to train on: there are {len(names)} documents in all "
            "(a number is a count, 0.05 a fraction, anything else a pattern on the name such as '*1961*')"
        )
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
