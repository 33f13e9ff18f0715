"""The parsers of all commands, taken from the commands themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any
from unittest import mock

from stoker import main as dispatcher

#: Commands that select a parser by their first argument.
KINDS = {"bench": [["serve"], ["throughput"], ["latency"]]}


class _ParserFound(BaseException):
    """Carries a parser out of a command that is about to use it."""


def commands() -> dict[str, EntryPoint]:
    """Return all commands by name, in the order of ``stoker --help``."""
    entries = {entry.name: entry for entry in entry_points(group=dispatcher.GROUP)}
    return {name: entries[name] for name in sorted(entries, key=_position)}


def _position(name: str) -> tuple[int, str]:
    names = list(dispatcher.SUMMARIES)
    return names.index(name) if name in names else len(names), name


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the parser of each command, with its words: ``bench serve``."""
    for name, entry in commands().items():
        for kind in KINDS.get(name, [[]]):
            yield " ".join([name, *kind]), _parser(entry, kind)


def _parser(entry: EntryPoint, arguments: list[str]) -> argparse.ArgumentParser:
    def found(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _ParserFound(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", found):
        try:
            entry.load()(arguments)
        except _ParserFound as caught:
            parser: argparse.ArgumentParser = caught.args[0]
            return parser
    raise RuntimeError(f"stoker {entry.name} uses no parser")
