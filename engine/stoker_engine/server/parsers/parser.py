"""Text of a model → parts: first the reasoning is set apart, then the calls of tools in what follows it.

A parser gets the text of one sequence as it comes, split anywhere, and emits what can no longer change: what it emits
for pieces of a text is, joined, what it emits for the whole. What it cannot read is content, unchanged and in its
place: nothing that the model wrote is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from stoker_engine.server.parsers.parts import Content, Part, merged
from stoker_engine.server.parsers.tool_use import Tool


class ReasoningParser(Protocol):
    """The first stage, for one sequence.

    Args:
        prompt: the text of the prompt, whose end tells whether the reasoning is open, closed, or has not started.
        calls: whether a call of a tool, too, ends the reasoning.
        continued: whether the answer continues with a message that the prompt begins: it reasons only if that does.

    Attributes:
        markers: special tokens that it goes by: they must be visible in its text.
        answer_begins_after: texts of tokens after any of which the answer begins. Where it does after others as well,
            the parser has an `answer_pattern` that matches all of them: a grammar begins there.
        is_reasoning: whether the answer has not started.
    """

    markers: ClassVar[tuple[str, ...]]
    answer_begins_after: ClassVar[tuple[str, ...]]
    is_reasoning: bool

    def __init__(self, prompt: str, calls: bool = False, continued: bool = False) -> None: ...

    def feed(self, text: str) -> list[Part]:
        """`Reasoning` and `Content` in a further piece of the text."""
        ...

    def end(self) -> list[Part]:
        """What was held back, when no more text comes."""
        ...


class ToolParser(Protocol):
    """The second stage, for one sequence: its text is the content that the first one emits.

    Two class methods are optional. ``structural_tag(tools)`` keeps the arguments of calls that the model makes by
    itself to the tools' schemas. ``forced_call(tools)`` is the format of a whole output that is a call, the reasoning
    before it included, for models that cannot be forced to write calls in any other way than their own.

    Args:
        tools: those that may be called.

    Attributes:
        markers: special tokens that it goes by: they must be visible in its text.
    """

    markers: ClassVar[tuple[str, ...]]

    def __init__(self, tools: Sequence[Tool]) -> None: ...

    def feed(self, text: str) -> list[Part]:
        """`Content` and calls in a further piece of the text. A call comes once it is complete, and its arguments are
        a JSON object."""
        ...

    def end(self) -> list[Part]:
        """What was held back, when no more text comes; a call that is cut off is content."""
        ...


class AnswerParser:
    """Both stages, where there are any."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer has not started."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def is_within_call(self) -> bool:
        """Whether the last call is not complete: so far, or, after the end, because it was cut off."""
        return getattr(self._tools, "is_within_call", False)  # most parsers emit complete ones only

    def feed(self, text: str) -> list[Part]:
        """The parts in a further piece of the text."""
        if not text:
            return []
        return self._called([Content(text)] if self._reasoning is None else self._reasoning.feed(text))

    def end(self) -> list[Part]:
        """What was held back, when no more text comes."""
        parts = [] if self._reasoning is None else self._called(self._reasoning.end())
        return merged([*parts, *(self._tools.end() if self._tools is not None else ())])

    def _called(self, parts: Sequence[Part]) -> list[Part]:
        if self._tools is None:
            return merged(parts)
        tools, called = self._tools, list[Part]()
        for part in parts:
            called += tools.feed(part.text) if isinstance(part, Content) else [part]
        return merged(called)
