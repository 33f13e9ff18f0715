"""Base of parsers of tool calls that start with known texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from stoker_engine.server.parsers.call_text import CallText, NotACallError, Reading
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.parts import Content, Part
from stoker_engine.server.parsers.tool_use import Tool


class CallParser(ABC):
    """A `ToolParser` whose calls start with one of several texts.

    Text that turns out to be no call is content, unchanged and in its place. Calls of unknown tools are calls, as in
    vLLM: the client that runs the tools reports to the model that the tool does not exist.

    Text before the first call, between calls and after the last is dropped if it consists of `separators` only.

    Attributes:
        begins: texts with which calls start.
        separators: characters that may separate calls.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[Markers]
    separators: ClassVar[str] = " \t\r\n"

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.text = CallText()
        self._calls: Reading[None] | None = None
        self._begin = ""
        self._accepted = False  # whether a call has been accepted since `_begin`
        self._called = False
        self._blank: list[str] | None = []  # separators since the start or last call; None after other content

    @abstractmethod
    def calls(self, begin: str) -> Reading[None]:
        """Read the calls after `begin` from `text`, and accept each.

        Text read after the last accepted call is read again, as content or as the start of another call.
        """

    @property
    def is_first(self) -> bool:
        """Whether nothing but separators precedes the text that is being read."""
        return self._blank is not None and not self._called

    def content_of_no_call(self) -> int:
        """Return how many characters of rejected text are content; the rest is searched for another call."""
        return len(self._begin)

    def feed(self, text: str) -> list[Part]:
        """Return the parts of the next piece of text."""
        self.text.feed(text)
        return self._parts()

    def end(self) -> list[Part]:
        """End the output and return what was held back; an incomplete call is content."""
        self.text.end()
        parts = self._parts()
        if self._blank and not self._called:
            parts.append(Content("".join(self._blank)))
        return parts

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._calls is None:
                content, begin = self.text.before(self.begins)
                parts += self._content(content)
                if begin is None:
                    return parts
                self._begin, self._accepted = begin, False
                self._calls = self.calls(begin)
            over = self._go_on(self._calls)
            parts += self._take_accepted()
            if not over:
                return parts
            self._calls = None
            parts += self._content(self.text.rewind(0 if self._accepted else self.content_of_no_call()))

    def _go_on(self, calls: Reading[None]) -> bool:
        """Continue reading; return whether these calls have ended."""
        try:
            next(calls)
        except (StopIteration, NotACallError):
            return True
        return False

    def _take_accepted(self) -> list[Part]:
        accepted = self.text.accepted
        if accepted:
            self.text.accepted = []
            self._accepted = self._called = True
            self._blank = []
        return accepted

    def _content(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._blank is None:
            return [Content(text)]
        self._blank.append(text)
        if not text.strip(self.separators):
            return []
        text, self._blank = "".join(self._blank), None
        return [Content(text)]
