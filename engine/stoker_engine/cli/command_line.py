"""What all commands do with their words: parse them, say what was meant, turn errors into exit codes."""

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
    """Parses `arguments`.

    Raises:
        ArgumentError: a flag that does not exist, with what may have been meant; or a wrong value.
    """
    check_flags(parser, arguments)
    return parser.parse_args(list(arguments))


def check_flags(parser: Parser, arguments: Sequence[str]) -> None:
    """Raises:
    ArgumentError: a flag that does not exist, with what may have been meant.
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
            raise ArgumentError(name, f"no such flag; it is spelled {spelled}")
        close = difflib.get_close_matches(spelled, known, n=1, cutoff=0.7)
        raise ArgumentError(name, f"no such flag; did you mean {close[0]}?" if close else "no such flag")


def run(command: str, action: Callable[[], int]) -> int:
    """Runs `action`; its errors become a sentence and an exit code (2: a wrong argument or model, 1: it failed, 130:
    it was interrupted)."""
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
    """`arguments` with ``-i FILE`` spelled ``--input-file FILE``."""
    return [f"--{short[argument]}-file" if argument in short else argument for argument in arguments]


def with_model_flag(arguments: Sequence[str]) -> list[str]:
    """`arguments` with ``--model M`` moved where commands take MODEL: vLLM's offline commands have it as a flag."""
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
    """The first key of the environment's ``STOKER_API_KEY``, ``VLLM_API_KEY`` or ``OPENAI_API_KEY``."""
    for name in ("STOKER_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        if key := os.environ.get(name):
            return key
    return None
