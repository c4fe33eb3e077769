"""Dataclass fields with meanings and ranges: declared, checked, written and read. What a configuration consists of."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from parallel.errors import UserError


def option(default: Any, text: str, choices: tuple = (), low: float | None = None, below: float | None = None) -> Any:
    """A dataclass field with its one-line meaning and possible values: choices, or the least and a strict upper bound."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "low": low, "below": below})


def check_fields(config: Any, prefix: str = "") -> None:
    """Refuse values of the wrong type or outside a field's choices or range. Raises UserError naming the field."""
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(field.type):
            if not isinstance(value, field.type):
                raise UserError(f"{name} must be a {field.type.__name__}, not {value!r}")
            check_fields(value, name + ".")
            continue
        if not _is(value, field.type):
            raise UserError(f"{name}={value!r} must be {type_name(field.type)}")
        choices = field.metadata["choices"]
        if choices and value not in choices:
            raise UserError(f"{name}={value} is not one of {listed(choices)}")
        low, below = field.metadata["low"], field.metadata["below"]
        below = 2**31 if below is None and field.type is int else below  # jax counts with 32 bits
        if low is not None and value < low:
            raise UserError(f"{name}={value} is too small: the least is {low}")
        if below is not None and value >= below:
            raise UserError(f"{name}={value} is too large: it must be below {below}")


def _is(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is(item, get_args(kind)[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def type_name(kind: Any) -> str:
    """A field's type in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if get_origin(kind) is tuple:
        return {int: "integers", float: "numbers", str: "texts"}[get_args(kind)[0]] + " separated by commas"
    return words[kind]


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain nested dictionaries (tuples become lists in JSON)."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type, prefix: str = "") -> Any:
    """The inverse of `to_dict`. Raises UserError on a name that the configuration does not have."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    arguments = {}
    for name, value in values.items():
        if name not in fields:
            raise UserError(f"the saved configuration has {prefix}{name}, which this version does not know")
        nested = fields[name].type
        if dataclasses.is_dataclass(nested):
            value = from_dict(value, nested, f"{prefix}{name}.")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)


def listed(values: Any) -> str:
    """Values separated by commas."""
    return ", ".join(str(value) for value in values)


def finite(value: Any) -> Any:
    """A value in which numbers that JSON does not have (NaN, infinities) are null."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
