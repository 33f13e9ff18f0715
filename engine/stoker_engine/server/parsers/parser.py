"""Parsing of model output: first reasoning is separated from content, then tool calls from that content.

A parser receives the text of one sequence in arbitrary pieces and emits only final parts: their concatenation does not
depend on the pieces. Text that it cannot parse is content, unchanged and in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from stoker_engine.server.parsers.parts import Content, Part, merged
from stoker_engine.server.parsers.tool_use import Tool


class ReasoningParser(Protocol):
    """The first stage, for one sequence.

    Args:
        prompt: text of the prompt, which shows whether the reasoning is open, closed, or has not started.
        calls: whether a tool call also ends the reasoning.
        continued: whether the answer continues a message in the prompt, and so reasons only if that message ends so.

    Attributes:
        markers: special tokens that must be visible in the text.
        answer_begins_after: texts after any of which the answer begins. A parser with further such texts has an
            `answer_pattern` that matches all of them. Grammars apply to the text after them.
        is_reasoning: whether the output is still before the answer.
    """

    markers: ClassVar[tuple[str, ...]]
    answer_begins_after: ClassVar[tuple[str, ...]]
    is_reasoning: bool

    def __init__(self, prompt: str, calls: bool = False, continued: bool = False) -> None: ...

    def feed(self, text: str) -> list[Part]:
        """Return `Reasoning` and `Content` of the next piece of text."""
        ...

    def end(self) -> list[Part]:
        """End the output and return what was held back."""
        ...


class ToolParser(Protocol):
    """The second stage, for one sequence: its input is the content of the first stage, if any.

    These members are optional. ``structural_tag(tools)`` constrains the arguments of voluntary calls to the tools'
    schemas. ``forced_call(tools)`` is the format of a complete output with a forced call, including the reasoning
    before it, for models that can only be forced to call in their own format. ``new_call_id(name, call_index)`` returns
    an id that the chat template accepts. ``is_within_call`` states whether the last call is incomplete.

    Args:
        tools: tools that may be called.

    Attributes:
        markers: special tokens that must be visible in the text.
    """

    markers: ClassVar[tuple[str, ...]]

    def __init__(self, tools: Sequence[Tool]) -> None: ...

    def feed(self, text: str) -> list[Part]:
        """Return `Content` and calls of the next piece of text.

        A call in the model's own format is returned when it is complete; its arguments are a JSON object.
        """
        ...

    def end(self) -> list[Part]:
        """End the output and return what was held back; an incomplete call in the model's own format is content."""
        ...


class AnswerParser:
    """Combines the stages that the model has."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        """Whether the output is still before the answer; False without a reasoning parser."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def is_within_call(self) -> bool:
        """Whether the last call is incomplete."""
        return getattr(self._tools, "is_within_call", False)  # most parsers emit only complete calls

    def feed(self, text: str) -> list[Part]:
        """Return the parts of the next piece of text."""
        if not text:
            return []
        return self._called([Content(text)] if self._reasoning is None else self._reasoning.feed(text))

    def end(self) -> list[Part]:
        """End the output and return what was held back."""
        parts = [] if self._reasoning is None else self._called(self._reasoning.end())
        return merged([*parts, *(self._tools.end() if self._tools is not None else ())])

    def _called(self, parts: Sequence[Part]) -> list[Part]:
        if self._tools is None:
            return merged(parts)
        tools, called = self._tools, list[Part]()
        for part in parts:
            called += tools.feed(part.text) if isinstance(part, Content) else [part]
        return merged(called)
