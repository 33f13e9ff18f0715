"""The flags of ``vllm serve``, for parsing a command line without vLLM.

``vllm_flags.txt`` has one flag per line: the number of values (0, 1, ? for none or one, + for one or more) and its
spellings. It is generated from vLLM's own parser, and a test compares the two.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from stoker_engine.contract.argv import Parser

#: The version of vLLM that has these flags.
VERSION: Final = "0.32.0"
DATA: Final = Path(__file__).with_name("vllm_flags.txt")


class Flag(NamedTuple):
    """A flag of ``vllm serve``.

    Attributes:
        words: number of values: ``0``, ``1``, ``?`` or ``+``.
        names: its spellings, the usual one first.
    """

    words: str
    names: tuple[str, ...]

    @property
    def argument(self) -> str:
        """Its name with underscores, such as ``max_model_len``."""
        return self.names[0].lstrip("-").replace("-", "_")


@cache
def flags() -> tuple[Flag, ...]:
    """Return all flags."""
    lines = (line.split() for line in DATA.read_text().split("\n") if line and not line.startswith("#"))
    return tuple(Flag(words, tuple(names)) for words, *names in lines)


def find(word: str) -> Flag | None:
    """Return the flag with this spelling, also in forms such as ``--max_model_len`` and ``--compilation-config.mode``.

    Return None if there is no such flag.
    """
    spelled = _spelled(word)
    return next((flag for flag in flags() if spelled in flag.names), None)


def parse(words: Sequence[str]) -> tuple[dict[str, str | bool | list[str]], list[str]]:
    """Parse a command line, and return the values by argument and the unknown words.

    Raises:
        ArgumentError: a flag lacks its value, is ambiguous, or has a value and accepts none.
    """
    namespace, unknown = _parser().parse_known_args(_normalized(words))
    return vars(namespace), unknown


@cache
def _parser() -> Parser:
    # vLLM accepts abbreviated flags, so --tensor-parallel=2 must also be compared with a field.
    parser = Parser(prog="vllm serve", add_help=False, argument_default=argparse.SUPPRESS)
    for flag in flags():
        names = [name for name in flag.names if not name.startswith("--no-")]
        if len(names) < len(flag.names):
            parser.add_argument(*names, dest=flag.argument, action=argparse.BooleanOptionalAction)
        elif flag.words == "0":
            parser.add_argument(*names, dest=flag.argument, action="store_true")
        else:
            parser.add_argument(*names, dest=flag.argument, nargs=None if flag.words == "1" else flag.words)
    return parser


def _normalized(words: Sequence[str]) -> list[str]:
    """Return the words in the form that `_parser` expects.

    ``-O3`` is expanded, underscores of flags become dashes, and the key of ``--flag.key`` is removed.
    """
    result = []
    for word in words:
        optimization = re.fullmatch(r"-O=?(.+)", word)
        if optimization:
            result.append(f"--optimization-level={optimization[1]}")
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            result.append(_spelled(name) + equals + value)
        elif re.fullmatch(r"-[a-z]+\.[^=]*(=.*)?", word):
            name, equals, value = word.partition("=")
            result.append(name.partition(".")[0] + (equals and f"={json.dumps(value)}"))
        else:
            result.append(word)
    return result


def _spelled(name: str) -> str:
    head = name.partition("=")[0].partition(".")[0]
    return head.replace("_", "-") if head.startswith("--") else head
