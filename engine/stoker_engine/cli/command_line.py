"""Shared handling of command lines: parse flags, suggest corrections, turn errors into exit codes."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence

from stoker_common.errors import ArgumentError, ModelError, StokerError
from stoker_common.logs import report_exit
from stoker_engine.cli.ignored_vllm_flags import FOREIGN_FLAGS
from stoker_engine.contract.argv import Parser


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse `arguments`.

    Raises:
        ArgumentError: a flag is unknown (the message may suggest another one), or a value is invalid.
    """
    check_flags(parser, arguments)
    return parser.parse_args(list(arguments))


def check_flags(parser: Parser, arguments: Sequence[str]) -> None:
    """Check that all flags exist.

    Raises:
        ArgumentError: a flag is unknown; the message may suggest another one.
    """
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", parser.format_help()))
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0]
        if not re.fullmatch(r"--?[A-Za-z][\w-]*", name) or name in known:
            continue
        spelled = name.replace("_", "-")
        if spelled in FOREIGN_FLAGS:
            raise ArgumentError(name, FOREIGN_FLAGS[spelled])
        if spelled in known:
            raise ArgumentError(name, f"unknown flag; it is spelled {spelled}")
        close = difflib.get_close_matches(spelled, known, n=1, cutoff=0.7)
        raise ArgumentError(name, f"unknown flag; did you mean {close[0]}?" if close else "unknown flag")


def run(command: str, action: Callable[[], int]) -> int:
    """Run `action`, and report its errors.

    Returns:
        The exit code of `action`, or 2: invalid argument or model, 1: another `StokerError`, 130: interrupted.
    """
    try:
        return action()
    except ArgumentError as error:
        report_exit("stoker_engine", command, error, f"Try '{command} --help'.")
        return 2
    except ModelError as error:
        report_exit("stoker_engine", command, error)
        return 2
    except StokerError as error:
        report_exit("stoker_engine", command, error)
        return 1
    except KeyboardInterrupt:
        return 130


def with_short_flags(arguments: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """Return `arguments` with short flags replaced: for ``{"-i": "input"}``, ``-i`` by ``--input-file``."""
    return [f"--{short[argument]}-file" if argument in short else argument for argument in arguments]


def with_model_flag(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with ``--model M``, the form of vLLM's offline commands, as the positional MODEL."""
    remaining, model = [], []
    items = iter(arguments)
    for argument in items:
        if argument == "--model":
            model = [next(items, "")]
        elif argument.startswith("--model="):
            model = [argument.removeprefix("--model=")]
        else:
            remaining.append(argument)
    return [*model, *remaining]


def api_key() -> str | None:
    """Return the first key in the variables ``STOKER_API_KEY``, ``VLLM_API_KEY`` and ``OPENAI_API_KEY``, or None."""
    for name in ("STOKER_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        if key := os.environ.get(name):
            return key
    return None
