"""What all commands do with their words: parse them, say what was meant, turn errors into exit codes."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from stoker_common.errors import ArgumentError, ModelError, StokerError
from stoker_engine.cli.ignored_vllm_flags import FOREIGN_FLAGS
from stoker_engine.contract.argv import Parser


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parses `words`.

    Raises:
        ArgumentError: a flag that does not exist, with what may have been meant; or a wrong value.
    """
    check_flags(parser, words)
    return parser.parse_args(list(words))


def check_flags(parser: Parser, words: Sequence[str]) -> None:
    """Raises:
    ArgumentError: a flag that does not exist, with what may have been meant.
    """
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", parser.format_help()))
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
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
    """Runs `action`; its errors become a sentence and an exit code (2: a wrong argument or model, 1: it failed)."""
    try:
        return action()
    except ArgumentError as error:
        print(f"{command}: {error}\nTry '{command} --help'.", file=sys.stderr)
        return 2
    except ModelError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except StokerError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1


def with_short_flags(words: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """`words` with ``-i FILE`` spelled ``--input-file FILE``."""
    return [f"--{short[word]}-file" if word in short else word for word in words]


def with_model_flag(words: Sequence[str]) -> list[str]:
    """`words` with ``--model M`` moved where commands take MODEL: vLLM's offline commands have it as a flag."""
    rest, model = [], []
    items = iter(words)
    for word in items:
        if word == "--model":
            model = [next(items, "")]
        elif word.startswith("--model="):
            model = [word.removeprefix("--model=")]
        else:
            rest.append(word)
    return [*model, *rest]


def api_key() -> str | None:
    """The first key of the environment's ``STOKER_API_KEY``, ``VLLM_API_KEY`` or ``OPENAI_API_KEY``."""
    for name in ("STOKER_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        if key := os.environ.get(name):
            return key
    return None
