"""What parsers of calls have in common: calls are found by what they begin with, all else is content."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from stoker_engine.server.parsers.call_text import CallText, NotACallError, Reading
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.parts import Content, Part
from stoker_engine.server.parsers.tool_use import Tool


class CallParser(ABC):
    """A `ToolParser` whose calls begin with one of some texts.

    What turns out to be no call is content, unchanged and in its place. Calls of tools that were not offered are calls,
    as in vLLM: whoever runs the tools tells the model that there is none of that name.

    Text next to a call that is only spaces and ends of lines is dropped, also before the first one and after the last;
    all other text arrives as it is.

    Attributes:
        begins: what calls begin with.
        separators: what may stand between calls and says nothing.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[Markers]
    separators: ClassVar[str] = " \t\r\n"

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.text = CallText()
        self._calls: Reading[None] | None = None
        self._begin = ""
        self._accepted = False  # a call since `_begin`
        self._called = False
        self._blank: list[str] | None = []  # what the content begins with since the last call; None: it says something

    @abstractmethod
    def calls(self, begin: str) -> Reading[None]:
        """Reads one or more calls after `begin` from `text`, and has it accept each. What it reads beyond the last one
        that was accepted is read again, as content or as the beginning of another."""

    @property
    def is_first(self) -> bool:
        """Whether nothing but spaces came before what is being read."""
        return self._blank is not None and not self._called

    def content_of_no_call(self) -> int:
        """How many characters of the text that seemed to be a call are content; the others may hold another one."""
        return len(self._begin)

    def feed(self, text: str) -> list[Part]:
        """The parts in a further piece of the text."""
        self.text.feed(text)
        return self._parts()

    def end(self) -> list[Part]:
        """What was held back; a call that is cut off is content."""
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
        """Reads on; whether it is over with these calls."""
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
