"""Dotted overrides: `--config.optimizer.lr=1e-4` on a tree of frozen dataclasses, and configuration files."""

import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from llm.config import Config
from llm.fields import type_name
from parallel.errors import UserError

PREFIX = "--config."


def leaves(config: Any, prefix: str = "") -> dict[str, tuple[dataclasses.Field, Any]]:
    """Every option of a configuration: dotted name to its field and value, in order."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found.update(leaves(value, f"{prefix}{field.name}."))
        else:
            found[prefix + field.name] = (field, value)
    return found


def suggest(word: str, words: Iterable[str]) -> str:
    """`: did you mean X?` for the nearest of the words, or nothing when none is near."""
    words = list(words)
    last = word.rpartition(".")[2]
    same_end = [other for other in words if other.rpartition(".")[2] == last]
    by_end = {other.rpartition(".")[2]: other for other in words}
    near = (
        difflib.get_close_matches(word, same_end, n=1, cutoff=0)
        or difflib.get_close_matches(word, words, n=1, cutoff=0.6)
        or [by_end[end] for end in difflib.get_close_matches(last, by_end, n=1, cutoff=0.6)]
    )
    return f": did you mean {near[0]}?" if near else ""


def split(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate `--config.name=value` (or `--config.name value`) from the other arguments. Raises UserError."""
    rest, overrides, queue = [], [], list(arguments)
    while queue:
        argument = queue.pop(0)
        if not argument.startswith(PREFIX):
            rest.append(argument)
            continue
        name, equals, text = argument.removeprefix(PREFIX).partition("=")
        if not name:
            raise UserError(f"{argument}: which option? {PREFIX}NAME=VALUE, as in {PREFIX}train.steps=100")
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise UserError(f"{argument} needs a value: {argument}=VALUE")
            text = queue.pop(0)
        overrides.append((name, text))
    return rest, overrides


def parse(name: str, text: str, kind: Any) -> Any:
    """`text` as a value of a field's type. Raises UserError naming the field and what it takes."""
    if get_origin(kind) is tuple:
        items = text.strip().strip("()[]").split(",")
        return tuple(parse(name, item.strip().strip("'\""), get_args(kind)[0]) for item in items if item.strip())
    if kind is str:
        return text
    if kind is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    if kind is int:
        if re.fullmatch(r"[+-]?\d+", text):
            return int(text)
        number = _number(text)
        if number is not None and number.is_integer():
            return int(number)
    if kind is float and (number := _number(text)) is not None:
        return number
    raise UserError(f"{name}={text}: expected {type_name(kind)}")


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) else None


def apply(config: Any, overrides: Iterable[tuple[str, str]]) -> Any:
    """The configuration with each (dotted name, text) parsed to the field's type and replaced. Raises UserError."""
    for name, text in overrides:
        known = leaves(config)
        if name not in known:
            inside = [other.rpartition(".")[2] for other in known if other.startswith(name + ".")]
            if inside:
                raise UserError(f"{name} is a group of options ({', '.join(inside)}): set one, as in {name}.{inside[0]}")
            raise UserError(f"the configuration has no {name}{suggest(name, known)}")
        field = known[name][0]
        value = parse(name, text, field.type)
        choices = field.metadata["choices"]
        if choices and value not in choices:
            hint = suggest(str(value), map(str, choices))
            raise UserError(f"{name}={value} is not one of {', '.join(map(str, choices))}{hint}")
        config = _replace(config, name.split("."), value)
    return config


def _replace(config: Any, path: list[str], value: Any) -> Any:
    head, *rest = path
    return dataclasses.replace(config, **{head: _replace(getattr(config, head), rest, value) if rest else value})


def load(file: str) -> Config:
    """The configuration that a Python file's `get_config()` returns.

    Raises UserError: no such file, no get_config, an unknown field (with the nearest), or an error inside the file.
    """
    path = Path(file)
    if not path.is_file():
        here = sorted(path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = suggest(path.name, [other.name for other in here])
        raise UserError(f"--config={file}: there is no such file{hint}")
    spec = importlib.util.spec_from_file_location(f"convoy_config_{path.stem}", path)
    if spec is None:
        raise UserError(f"--config={file}: a configuration is a Python file (.py) with get_config()")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config() if hasattr(module, "get_config") else None
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--config={file}{_where(error, path)}: {_explain(error)}") from error
    if not isinstance(config, Config):
        raise UserError(f"--config={file}: the file must have get_config() returning a llm.config.Config")
    return config


def _where(error: Exception, path: Path) -> str:
    """The line of the configuration file in which an error arose."""
    lines, trace = [getattr(error, "lineno", None)] if isinstance(error, SyntaxError) else [], error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" line {lines[-1]}" if lines else ""


def _explain(error: Exception) -> str:
    """An exception in words; a misspelt field gets the nearest name."""
    unknown = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if unknown:
        groups = {type(value).__name__: value for value in vars(Config()).values() if dataclasses.is_dataclass(value)}
        groups["Config"] = Config()
        if unknown[1] in groups:
            names = [field.name for field in dataclasses.fields(groups[unknown[1]])]
            return f"{unknown[1]} has no field {unknown[2]}{suggest(unknown[2], names)}"
    return f"{type(error).__name__}: {error}"
