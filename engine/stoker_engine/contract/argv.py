"""Conversion between dataclasses and command lines: one declaration yields the parser, the argv and the help.

A field of an arguments dataclass becomes ``--field-name``, or a positional argument. Its type determines the parsing,
its metadata holds the help and the choices. `to_argv` writes only flags that differ from the default, so that an argv
stays readable in ``kubectl describe`` and follows changes of defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import types
import typing
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

from stoker_common.errors import ArgumentError

T = TypeVar("T")

_SIZES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def flag(
    help: str,
    default: Any,
    *,
    choices: Sequence[str] = (),
    positional: bool = False,
    group: str | None = None,
    short: str | None = None,
    infinite: bool = False,
    repeatable: bool = False,
) -> Any:
    """Declare a dataclass field that is also a command-line argument.

    Args:
        group: title of a new group of the help, to which this field and the next ones belong; None: the previous
            field's group.
        short: second spelling, such as ``-tp``; `to_argv` writes ``--field-name``.
        infinite: whether a float may be ``inf``.
        repeatable: for tuples: whether each use of the flag adds its values; otherwise the last use replaces earlier
            ones.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "positional": positional,
        "group": group,
        "short": short,
        "infinite": infinite,
        "repeatable": repeatable,
    }
    if positional:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """Return ``--max-num-seqs`` for ``max_num_seqs``."""
    return "--" + field_name.replace("_", "-")


def human_int(text: str) -> int:
    """Parse ``8192``, ``8k`` (8,000) or ``8K`` (8,192), as vLLM reads sizes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 8192, 8k or 8K")
    value = Decimal(match[1]) * _SIZES.get(match[2], 1)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def number(text: str) -> float:
    """Parse a finite number such as ``0.5``, ``5`` or ``1e-3``; numbers beyond float's range are refused."""
    value = number_or_infinity(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def number_or_infinity(text: str) -> float:
    """Parse a number such as ``0.5`` or ``inf``; NaN is refused."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `ArgumentError` on invalid arguments instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as an error that names the flag, if the message does."""
        match = re.match(r"argument (\S+?)(?:/\S+)?: (.*)", message)
        if match:
            raise ArgumentError(match[1], match[2])
        raise ArgumentError("arguments", message)


class _Extend(argparse.Action):
    """Append a flag's values to those of its earlier uses."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Append the values of one use of the flag."""
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, [*(before if isinstance(before, list) else ()), *values])


def add_arguments(parser: argparse.ArgumentParser, cls: type[Any], title: str) -> None:
    """Add every field of dataclass `cls` to `parser`, in the fields' groups; `title` names the first group."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, many = _element_type(hints[field.name])
        meta = field.metadata
        if meta.get("group"):
            group = parser.add_argument_group(meta["group"])
        options: dict[str, Any] = {"help": meta["help"].replace("%", "%%")}
        if meta["choices"]:
            options["choices"] = meta["choices"]
        if meta["positional"]:
            group.add_argument(field.name, **options)
            continue
        options["dest"] = field.name
        options["default"] = field.default
        if field.default not in (None, ()):
            shown = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            options["help"] += f" (default: {shown})"
        if kind is bool:
            group.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, **options)
            continue
        number_parsers = {int: human_int, float: number_or_infinity if meta.get("infinite") else number}
        options["type"] = number_parsers.get(kind, kind)
        if not meta["choices"]:
            options["metavar"] = field.name.rsplit("_", 1)[-1].upper()
        if many:
            options["nargs"] = "+"
            if meta.get("repeatable"):
                options["action"] = _Extend
        short = (meta["short"],) if meta.get("short") else ()
        group.add_argument(flag_name(field.name), *short, **options)


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """Build the dataclass `cls` from the result of a parser that `add_arguments` filled."""
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = getattr(namespace, field.name)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def to_argv(args: Any) -> list[str]:
    """Return the command line for `args`: positional arguments first, without flags at their default."""
    argv: list[str] = []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.metadata["positional"]:
            argv.insert(0, value)
        elif value == field.default:
            continue
        elif isinstance(value, bool):
            argv.append(flag_name(field.name) if value else "--no-" + flag_name(field.name)[2:])
        elif isinstance(value, tuple) and not (field.metadata.get("repeatable") and _has_dash(value)):
            argv += [flag_name(field.name), *map(str, value)]
        else:
            # One argument for flag and value, so that a value that begins with a dash is not parsed as a flag.
            values = value if isinstance(value, tuple) else (value,)
            argv += [f"{flag_name(field.name)}={each}" for each in values]
    return argv


def _has_dash(values: Sequence[object]) -> bool:
    return any(str(value).startswith("-") for value in values)


def _element_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether the flag takes several values."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    if typing.get_origin(hint) is typing.Literal:
        return str, False
    return hint, False
