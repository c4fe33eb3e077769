"""The command line: commands, their flags and help, `--config.NAME=VALUE`, errors as one sentence with an exit code."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from absl import flags

from llm import overrides
from llm.config import Config
from llm.fields import finite, type_name
from parallel.errors import CheckError, UserError

REQUIRED = ("workdir", "source", "destination")  # flags that a command which has them cannot do without


class Flag(NamedTuple):
    """A command-line flag; a default of the empty tuple makes it repeatable."""

    name: str
    default: Any
    value: str
    text: str


class Options:
    """The flags of one call as attributes, and `changes`, the configuration overrides."""

    def __init__(self, values: flags.FlagValues, changes: list[tuple[str, str]]):
        self.changes = changes
        self.__dict__.update({name: values[name].value for name in values})


@dataclass(frozen=True)
class Command:
    """What a command does, its flags, and its function: takes `Options`, returns (document, text, exit code).

    The document is printed as JSON with --json, the text without. `groups`: the parts of the configuration that its
    help lists; with none, it takes no --config.NAME=VALUE.
    """

    summary: str
    run: Callable[[Options], tuple[Any, str, int]]
    flags: tuple[Flag, ...]
    groups: tuple[str, ...] = ()


def dispatch(commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    try:
        return _run(commands, list(arguments))
    except (UserError, CheckError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt as stop:
        print(": ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _run(commands: Mapping[str, Command], arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    asks_help = "--help" in arguments or "-h" in arguments
    if not arguments:
        raise UserError(f"which command? One of {', '.join(commands)} (python main.py --help)")
    if arguments[0] in ("--help", "-h"):
        print(_overview(commands))
        return 0
    name = arguments[0]
    if name not in commands:
        hint = overrides.suggest(name, commands)
        raise UserError(f"{name} is not a command{hint or ': there are ' + ', '.join(commands)}")
    if asks_help:
        print(_help(name, commands[name]))
        return 0
    options = _parse(name, commands[name], arguments[1:])
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        document, text, code = commands[name].run(options)
    output = json.dumps(finite(document), allow_nan=False) if options.json else text
    if output:
        print(output)
    return code


def _parse(name: str, command: Command, arguments: list[str]) -> Options:
    rest, changes = overrides.split(arguments)
    if changes and not command.groups:
        raise UserError(f"{name} takes no --config.NAME=VALUE")
    values = flags.FlagValues()
    define = {str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float, bool: flags.DEFINE_bool}
    for flag in command.flags:
        if flag.default == ():
            flags.DEFINE_multi_string(flag.name, [], flag.text, flag_values=values)
        else:
            kind = str if flag.default is None else type(flag.default)
            define[kind](flag.name, flag.default, flag.text, flag_values=values)
    try:
        extra = values([name, *rest])[1:]
    except flags.UnrecognizedFlagError as error:
        hint = overrides.suggest(error.flagname.replace("-", "_"), [flag.name for flag in command.flags])
        raise UserError(f"{name} has no flag --{error.flagname}{hint.replace('mean ', 'mean --')}") from error
    except flags.Error as error:
        raise UserError(_wrong_value(str(error), command)) from error
    if extra:
        raise UserError(f"{name} does not know what to do with {extra[0]!r}: flags are --NAME=VALUE")
    for flag in command.flags:
        if flag.name in REQUIRED and not values[flag.name].value:
            raise UserError(f"{name} needs --{flag.name}={flag.value}: {flag.text}")
    return Options(values, changes)


def _wrong_value(message: str, command: Command) -> str:
    """A flag error of absl in our words."""
    name, equals, value = message.removeprefix("flag --").partition(":")[0].partition("=")
    kinds = {flag.name: type(flag.default) for flag in command.flags}
    if equals and kinds.get(name) in (int, float, bool):
        return f"--{name}={value}: expected {type_name(kinds[name])}"
    return message


def _overview(commands: Mapping[str, Command]) -> str:
    rows = [(name, command.summary) for name, command in commands.items()]
    return "\n".join(
        [
            "Convoy trains and evaluates language models with pipeline parallelism, one compiled program per step.",
            "",
            "usage: python main.py COMMAND [--flag=value ...] [--config.NAME=VALUE ...]",
            "",
            *_columns(rows),
            "",
            "python main.py COMMAND --help lists a command's flags and the configuration.",
            "Exit codes: 0 done, 1 failed, 2 wrong input, 3 does not fit, 4 a check failed, 70 hung, 75 stopped and saved.",
        ]
    )


def _help(name: str, command: Command) -> str:
    usage = [f"--{flag.name}={flag.value}" for flag in command.flags if flag.name in (*REQUIRED, "config")]
    lines = [" ".join(["usage: python main.py", name, *usage, "[--flag=value ...]"]), "", command.summary, "", "Flags"]
    lines += _columns([(f"--{flag.name}={flag.value}".removesuffix("="), _meaning(flag)) for flag in command.flags])
    if command.groups:
        lines += ["", "Configuration (--config.NAME=VALUE; the defaults are shown)"]
    for name in command.groups:
        value = getattr(Config(), name)
        if dataclasses.is_dataclass(value):
            options = overrides.leaves(value, f"{name}.")
            lines += ["", f"  {value.__doc__}"]
        else:
            options = {name: overrides.leaves(Config())[name]}
        lines += _columns([_option(*item) for item in options.items()], 34)
    return "\n".join(lines)


def _option(name: str, option: tuple[dataclasses.Field, Any]) -> tuple[str, str]:
    field, value = option
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    choices = " | ".join(map(str, field.metadata["choices"]))
    return (
        f"{name}={shown.lower() if isinstance(value, bool) else shown}",
        field.metadata["help"] + (f" ({choices})" if choices else ""),
    )


def _meaning(flag: Flag) -> str:
    shows_default = flag.default not in (None, (), False, 0, -1, "") or isinstance(flag.default, float)
    return f"{flag.text} (default {flag.default})" if shows_default else flag.text


def _columns(rows: list[tuple[str, str]], width: int = 0) -> list[str]:
    """Rows of two columns, the second wrapped to the terminal."""
    width = width or max(len(left) for left, _ in rows) + 2
    room = max(shutil.get_terminal_size((100, 24)).columns - width - 2, 30)
    lines = []
    for left, right in rows:
        first, *more = textwrap.wrap(right, room) or [""]
        lines.append(f"  {left.ljust(width)}{first}" if len(left) < width else f"  {left}  {first}")
        lines += [" " * (width + 2) + line for line in more]
    return lines
