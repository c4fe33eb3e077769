"""Text files made into a folder of tokenised documents that many runs can read."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm.data import sources, store
from llm.data.corpus import is_store, open_store
from llm.data.tokenization import build_once, fingerprints, hash_of, lock_of, tokenise
from llm.data.tokenizer import Tokenizer
from parallel.errors import UserError


def tokenize(
    paths: Sequence[str], tokenizer: str, output: str | Path | None, workers: int = 0, format: str = "memory_map"
) -> dict[str, Any]:
    """Tokenise the text behind `paths` into the new folder `output`, which data.paths or data.mixture then names.

    tokenizer: path of a tokenizer.json; workers: processes, 0: one a CPU (their number changes nothing in the result);
    format: one of store.FORMATS. Killed, the same call goes on with what was done, in OUTPUT.work beside it. Returns
    output, documents, tokens, bytes (UTF-8, of the text), files, format, tokenizer (its hash), wall_s. Raises UserError.
    """
    if not output:
        raise UserError("tokenize needs --output=FOLDER, a new folder to write")
    began, output = time.monotonic(), Path(output).expanduser()
    if format not in store.FORMATS:
        raise UserError(f"--format={format}: the formats are {' and '.join(store.FORMATS)}")
    if workers < 0:
        raise UserError(f"--workers={workers}: a number of processes, or 0 for one a CPU")
    if format == "array_record":
        store.grain()
    if not tokenizer:
        raise UserError("tokenize needs --tokenizer=FILE, a tokenizer.json; the folder of every run holds its own")
    model = Tokenizer.load(sources.locate(tokenizer), None, "--tokenizer")
    for path in paths:
        if is_store(sources.locate(path)):
            raise UserError(f"--paths: {path!r} is tokenised already: name it in data.paths or data.mixture")
    files = sources.find_sources(paths, "--paths")
    if output.exists() and not is_store(output) and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"--output={output} exists and holds something else: name a new folder")
    work = output.with_name(f"{output.name}.work")
    try:
        work.mkdir(parents=True, exist_ok=True)
        stamps = work / "sources.json"
        facts = fingerprints(files, stamps)
        wanted = (hash_of(facts), model.hash, format)

        def is_done() -> bool:
            if not is_store(output):
                return False
            index = open_store(output).index
            if (index["sources"], index["tokenizer"], index["format"]) != wanted:
                raise UserError(f"--output={output} holds other text, tokens or another format: name a new folder")
            return True

        build_once(output, work, is_done, lambda: tokenise(work, files, facts, model, format, workers, stamps))
        lock_of(work).unlink(missing_ok=True)
    except ChildProcessError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or output} cannot be read or written: {error.strerror or error}") from error
    made = open_store(output)
    return {
        "output": str(output),
        "documents": made.index["documents"],
        "tokens": made.index["tokens"],
        "bytes": int(made.documents_D["bytes"].sum()),
        "files": len(made.index["files"]),
        "format": format,
        "tokenizer": model.hash,
        "wall_s": time.monotonic() - began,
    }


def table(document: dict[str, Any]) -> str:
    """What `tokenize` did, as text."""
    return (
        f"{document['documents']:,} documents, {document['tokens']:,} tokens of {document['bytes']:,} bytes in "
        f"{document['files']:,} files after {document['wall_s']:.1f} s\n"
        f"train on them with --config.data.paths={document['output']}"
    )
