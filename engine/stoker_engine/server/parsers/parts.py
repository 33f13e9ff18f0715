"""The parts of an answer, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a tool begins.

    Attributes:
        name: of the tool.
        id: of the call, where the model gives it one.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of the call that began last; all of them together are the text of a JSON object."""

    text: str


Part = Content | Reasoning | ToolCallStart | ToolCallArguments


def tool_call(name: str, arguments: str, id: str | None = None) -> list[Part]:
    """A whole call."""
    return [ToolCallStart(name, id), ToolCallArguments(arguments)]


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours of one kind joined, and without empty texts."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match last, part:
            case (_, ToolCallStart()):
                joined.append(part)
            case (_, Content("") | Reasoning("") | ToolCallArguments("")):
                pass
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (ToolCallArguments(before), ToolCallArguments(text)):
                joined[-1] = ToolCallArguments(before + text)
            case _:
                joined.append(part)
    return joined
