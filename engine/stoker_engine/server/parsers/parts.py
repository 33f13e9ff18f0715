"""The parts of a model's output."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a tool call.

    Attributes:
        name: name of the tool.
        id: id of the call; None if the API may choose one.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the last started call's arguments. All its pieces form a JSON object, which may be cut off."""

    text: str


Part = Content | Reasoning | ToolCallStart | ToolCallArguments


def tool_call(name: str, arguments: str, id: str | None = None) -> list[Part]:
    """Return the parts of a complete call."""
    return [ToolCallStart(name, id), ToolCallArguments(arguments)]


def merged(parts: Iterable[Part]) -> list[Part]:
    """Join neighbouring texts of the same kind, and drop empty ones."""
    joined: list[Part] = []
    non_empty = [part for part in parts if isinstance(part, ToolCallStart) or part.text]
    if len(non_empty) < 2:
        return non_empty
    for kind, alike in itertools.groupby(non_empty, type):
        run: list[Part] = list(alike)
        if len(run) == 1 or kind is ToolCallStart:
            joined += run
        else:
            joined.append(kind("".join(part.text for part in run if not isinstance(part, ToolCallStart))))
    return joined
