"""Models from Hugging Face folders and GGUF files into a run's folder, and back: tensor by tensor, never the whole model.

<workdir>/huggingface/     what came with an imported model and is handed on: config.json, tokenizer, generation config
<workdir>/checkpoints/0/   its parameters; there is no optimiser state"""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from llm import safetensor_files
from llm.arrays import Info
from llm.checkpoint import Checkpoints, names, read, writing
from llm.config import BatchConfig, Config, DataConfig, ModelConfig, TrainConfig
from llm.data.tokenizer import Tokenizer
from llm.families import family_of, fitting
from llm.families.family import Family, Json, Tensor
from llm.fields import to_dict
from llm.run import TOKENIZER, pick_step
from llm.workdir import CHECKPOINTS, CONFIG, load_config, newest_step, save_config, write_atomically
from parallel.errors import UserError

FOLDER = "huggingface"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
GENERATION = "generation_config.json"
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")  # of config.json, besides the model's shape
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
SHARD_BYTES = 4_000_000_000
BLOCK = 1 << 24  # numbers of an embedding in memory at a time
SHOWN = 6  # names in a message


class Stored(Protocol):
    """A tensor of a source. dtype: its type in the file, for people."""

    dtype: str
    shape: tuple[int, ...]

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start to stop of the tensor, in fp32."""


class Source(Protocol):
    """A model to import: config.json, tensors by Hugging Face's names, and text of the small files that come with it."""

    config: Json
    tensors: dict[str, Stored]
    files: dict[str, str]


class HuggingFaceFolder:
    """config.json, safetensors in one file or in shards with an index, tokenizer files. Raises UserError."""

    def __init__(self, folder: Path):
        self.config = _json(folder / CONFIG)
        if (folder / INDEX).is_file():
            where = _json(folder / INDEX).get("weight_map", {})
            shards = {file: safetensor_files.entries(_file(folder / file)) for file in sorted(set(where.values()))}
            lost = [name for name, file in where.items() if name not in shards[file]]
            if lost:
                raise UserError(f"{folder / INDEX} names tensors that are not in their files: {_some(lost)}")
        elif (folder / WEIGHTS).is_file():
            shards = {WEIGHTS: safetensor_files.entries(folder / WEIGHTS)}
        else:
            raise UserError(f"{folder} has no {WEIGHTS} and no {INDEX}: save the model in the safetensors format")
        self.tensors: dict[str, Stored] = {name: entry for shard in shards.values() for name, entry in shard.items()}
        small = [folder / name for name in (CONFIG, GENERATION, *TOKENIZER_FILES)]
        self.files = {path.name: path for path in small if path.is_file()}


def open_source(source: str | Path) -> Source:
    """The model in a Hugging Face folder or a GGUF file. Raises UserError."""
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        from llm.gguf import GgufFile

        return GgufFile(path)
    if not path.is_dir():
        raise UserError(f"--source={source} is neither a folder with config.json and safetensors nor a .gguf file")
    return HuggingFaceFolder(path)


# ------------------------------------------------------------------------------------------- import
def import_model(source: str | Path, workdir: str | Path) -> Json:
    """Writes a published model into `workdir` as step 0 of a run; returns what was read, tied and left out (see `table`).

    Everything is checked before anything is written. Raises UserError on a model that is not supported, and naming the
    tensors that are unknown, missing or of another shape."""
    workdir, opened = Path(workdir), open_source(source)
    if newest_step(workdir) is not None or (workdir / CONFIG).exists():
        raise UserError(f"--workdir={workdir}: there is a run in this folder; import into another one")
    family = family_of(str(opened.config.get("model_type")))
    model = family.read(opened.config)
    expected = list(family.tensors(model))
    found, notes = _match(family, model, expected, opened.tensors)
    tokenizer = _keep_files(opened, workdir, model)
    config = _run_config(model, workdir if tokenizer else None)
    infos = {}
    for tensor in expected:
        for name, spec in zip(tensor.parts, tensor.specs):
            shape = (model.layers, *spec.shape) if spec.stacked else spec.shape
            infos[f"params/{name}"] = Info.of(shape, np.float32, spec.stacked)
    meta = {
        "config": to_dict(config),
        "tokenizer": tokenizer.hash if tokenizer else None,
        "corpus": None,
        "imported": {"source": str(source), "family": family.name},
    }
    with writing(workdir / CHECKPOINTS, 0, infos, meta) as put:
        for tensor in expected:
            _put(put, tensor, found[tensor.name], infos)
    save_config(workdir, config)
    return {
        "source": str(source),
        "workdir": str(workdir),
        "step": 0,
        "family": family.name,
        "parameters": sum(int(np.prod(info.shape)) for info in infos.values()),
        "tied": model.tied,
        "vocab": model.vocab,
        "tokenizer": tokenizer.size if tokenizer else None,
        "tensors": _rows(expected, {name: stored.dtype for name, stored in found.items()}) + notes,
    }


def _put(put: Callable[..., None], tensor: Tensor, stored: Stored, infos: dict[str, Info]) -> None:
    """A function of its own, so that one tensor is gone before the next is read."""
    if tensor.specs[0].kind == "embedding":  # the largest tensor of many models: never whole in memory
        name = f"params/{tensor.parts[0]}"
        for rows in _row_blocks(tensor.shape, infos[name].rows):
            put(name, stored.read(rows.start, rows.stop), rows=rows)
        return
    for name, value in tensor.to_ours(stored.read()).items():
        put(f"params/{name}", value, tensor.layer)


def _row_blocks(shape: Sequence[int], multiple: int = 1) -> Iterator[slice]:
    """Slices of BLOCK numbers that together are all rows; their length is a multiple of `multiple` but for the last."""
    number = max(1, BLOCK // (multiple * math.prod(shape[1:]))) * multiple
    for start in range(0, shape[0], number):
        yield slice(start, min(start + number, shape[0]))


def table(document: Json) -> str:
    """What `import_model` or `export_model` returned, for people."""
    rows = [("tensor", "number", "shape", "type", "parameter")]
    rows += [tuple(str(row[key]) for key in ("name", "number", "shape", "dtype", "parameter")) for row in document["tensors"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    tied = "the output head is the embedding (tied)" if document["tied"] else "the output head is a tensor of its own"
    lines += ["", f"{document['family']}, {document['parameters']:,} parameters; {tied}"]
    ids = document["tokenizer"]
    used = f"the tokenizer uses {ids}" if ids else "no tokenizer.json came with it: name one with --config.data.tokenizer"
    lines += [f"vocabulary of {document['vocab']} rows, {used}; layouts pad it in memory, never on disk"]
    where = {"destination", "workdir"} & set(document)
    return "\n".join([*lines, *(f"{name}: {document[name]}" for name in sorted(where))])


def _match(family: Family, model: ModelConfig, expected: list[Tensor], given: dict[str, Stored]) -> tuple[dict, list[Json]]:
    """The tensor of the source for each expected one, and rows for the table about the others. Raises UserError."""
    short = {tensor.name: tensor.name.removeprefix(family.prefix) for tensor in expected}
    found = {n: given[n if n in given else s] for n, s in short.items() if n in given or s in given}
    used = {n if n in given else s for n, s in short.items()}
    head = next(name for name, parts in family.names.items() if parts == ("head/tokens",))
    embedding = next(name for name, parts in family.names.items() if parts == ("embed/tokens",))
    buffers = [name for name in given if name not in used and name.endswith(family.buffers)]
    rest = [name for name in given if name not in used and name not in buffers and not (model.tied and name == head)]
    wrong = [
        f"{t.name} has shape {tuple(found[t.name].shape)} and {t.shape} is wanted"
        for t in expected
        if t.name in found and tuple(found[t.name].shape) != t.shape
    ]
    missing = [name for name in short if name not in found]
    problems = [f"missing: {_some(missing)}"] if missing else []
    problems += [f"unknown: {_some(rest)}"] if rest else []
    problems += [f"misshapen: {_some(wrong)}"] if wrong else []
    if problems:
        raise UserError(f"the tensors are not those of this {family.name} model; " + "; ".join(problems))
    notes = [_row(name, 1, given[name].shape, given[name].dtype, "left out: no parameter") for name in buffers]
    if model.tied and head in given:
        one, two = found[embedding], given[head]
        same = lambda rows: np.array_equal(one.read(rows.start, rows.stop), two.read(rows.start, rows.stop))
        if one.shape != two.shape or not all(map(same, _row_blocks(one.shape))):
            raise UserError(f"config.json ties the output head to the embedding, but {head} differs from {embedding}: "
                            "set tie_word_embeddings to false in it, or remove the tensor")  # fmt: skip
        notes.append(_row(head, 1, two.shape, two.dtype, "tied: equal to the embedding"))
    return found, notes


def _rows(expected: Sequence[Tensor], dtypes: dict[str, str]) -> list[Json]:
    """One row for the tensors of all layers that have the same name otherwise."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for tensor in expected:
        groups.setdefault(tensor.parts, []).append(tensor)
    rows = []
    for parts, group in groups.items():
        name = group[0].name if group[0].layer is None else group[0].name.replace(".0.", ".*.", 1)
        dtype = "+".join(sorted({dtypes[tensor.name] for tensor in group}))
        rows.append(_row(name, len(group), group[0].shape, dtype, ", ".join(parts)))
    return rows


def _row(name: str, number: int, shape: Sequence[int], dtype: str, parameter: str) -> Json:
    return {"name": name, "number": number, "shape": list(shape), "dtype": dtype, "parameter": parameter}


def _keep_files(opened: Source, workdir: Path, model: ModelConfig) -> Tokenizer | None:
    """Copies the small files; returns the tokenizer. Raises UserError when its ids do not fit the model."""
    folder = workdir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in opened.files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_text(content)
    if TOKENIZER not in opened.files:
        return None
    tokenizer = Tokenizer.load(folder / TOKENIZER, model.vocab)
    shutil.copyfile(folder / TOKENIZER, workdir / TOKENIZER)
    return tokenizer


def _run_config(model: ModelConfig, tokenizer: Path | None) -> Config:
    batch = BatchConfig()
    if model.positions == "learned":
        batch = dataclasses.replace(batch, length=min(batch.length, model.max_length))
    data = DataConfig(tokenizer=str(tokenizer / TOKENIZER) if tokenizer else "")
    return Config(model=model, data=data, batch=batch, train=TrainConfig())


# ------------------------------------------------------------------------------------------- export
def export_model(
    workdir: str | Path, destination: str | Path, step: int | None = None, dtype: str = "", shard_bytes: int = SHARD_BYTES
) -> Json:
    """Writes checkpoint `step` (None or -1: the newest) of a run as a folder that transformers loads.

    dtype: of the tensors, '' for that of the imported model, or else float32. Raises UserError when no family that Hugging
    Face knows has such a model, or the folder is there already."""
    workdir, destination = Path(workdir), Path(destination)
    model = load_config(workdir).model.resolved()
    step = pick_step(Checkpoints(workdir / CHECKPOINTS, 1), workdir, step)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"--destination={destination} is there already and not empty: name another folder")
    origin = _json(workdir / FOLDER / CONFIG) if (workdir / FOLDER / CONFIG).is_file() else {}
    family = family_of(origin["model_type"]) if origin else fitting(model)
    dtype = dtype or origin.get("dtype") or origin.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UserError(f"--dtype={dtype} is not one of {', '.join(DTYPES)}")
    expected = list(family.tensors(model))
    have = names(workdir / CHECKPOINTS, step)
    lost = [part for tensor in expected for part in tensor.parts if f"params/{part}" not in have]
    if lost:
        raise UserError(f"step {step} in {workdir} lacks {_some(lost)}: it was saved by another model")

    part = destination.with_name(destination.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _write_weights(part, expected, DTYPES[dtype], shard_bytes, workdir / CHECKPOINTS, step)
    ids = _write_small(part, workdir, origin, model)
    config = family.write(model) | ids | {"dtype": dtype, "torch_dtype": dtype}
    write_atomically(part / CONFIG, json.dumps(config, indent=2) + "\n")
    if destination.exists():
        destination.rmdir()
    part.rename(destination)
    return {
        "workdir": str(workdir),
        "destination": str(destination),
        "step": step,
        "family": family.name,
        "parameters": sum(int(np.prod(tensor.shape)) for tensor in expected),
        "tied": model.tied,
        "vocab": model.vocab,
        "tokenizer": Tokenizer.load(workdir / TOKENIZER, model.vocab).size if (workdir / TOKENIZER).is_file() else None,
        "tensors": _rows(expected, dict.fromkeys((tensor.name for tensor in expected), dtype)),
    }


def _write_weights(
    folder: Path, expected: list[Tensor], dtype: np.dtype, shard_bytes: int, checkpoints: Path, step: int
) -> None:
    """One file, or shards of at most shard_bytes (or of one larger tensor) and their index."""
    size = {tensor.name: int(np.prod(tensor.shape)) * dtype.itemsize for tensor in expected}
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for tensor in expected:
        if shards[-1] and size[tensor.name] > room:
            shards.append({})
            room = shard_bytes
        shards[-1][tensor.name] = tensor
        room -= size[tensor.name]
    where = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        where |= dict.fromkeys(shard, file)

        def rows(name, shard=shard):
            tensor, get = shard[name], functools.partial(read, checkpoints, step)
            if tensor.specs[0].kind == "embedding":
                yield from (get(f"params/{tensor.parts[0]}", rows=rows) for rows in _row_blocks(tensor.shape))
            else:
                yield tensor.from_ours([get(f"params/{part}", tensor.layer) for part in tensor.parts])

        safetensor_files.write(folder / file, {name: tensor.shape for name, tensor in shard.items()}, dtype, rows)
    if len(shards) > 1:
        total = {"total_parameters": sum(size.values()) // dtype.itemsize, "total_size": sum(size.values())}
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": where}, indent=2) + "\n")


def _write_small(folder: Path, workdir: Path, origin: Json, model: ModelConfig) -> Json:
    """Tokenizer and generation config; returns what config.json says of special tokens."""
    for name in (GENERATION, *TOKENIZER_FILES):
        if (workdir / FOLDER / name).is_file():
            shutil.copyfile(workdir / FOLDER / name, folder / name)
    if origin:
        ids = {key: origin[key] for key in KEPT if key in origin}
    elif (workdir / TOKENIZER).is_file():
        tokenizer = Tokenizer.load(workdir / TOKENIZER, model.vocab)
        shutil.copyfile(workdir / TOKENIZER, folder / TOKENIZER)
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.inner.id_to_token(tokenizer.end),
            "model_max_length": model.max_length,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.end, "pad_token_id": None}
    else:
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if not (folder / GENERATION).is_file():
        special = {key: value for key, value in ids.items() if key.endswith("_token_id")}
        (folder / GENERATION).write_text(json.dumps({"_from_model_config": True, **special}, indent=2) + "\n")
    return ids


# ------------------------------------------------------------------------------------------- small pieces
def _json(path: Path) -> Json:
    try:
        values = json.loads(_file(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object")
    return values


def _file(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path} is missing")
    return path


def _some(items: Sequence[str]) -> str:
    more = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {more} more" if more > 0 else "")
