"""Incremental reading of tool calls.

A format is described by a generator that calls `CallText`'s methods in the order of the text. Those that read yield
when they need more text to decide, so the result does not depend on how the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Final, TypeVar

from stoker_engine.server.fields.json_text import JSONScanner, NotJSONError
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.parts import Part

T = TypeVar("T")

#: A reader of text, which yields whenever it needs more, and returns its result.
Reading = Generator[None, None, T]

_SPACES: Final = re.compile(r"[ \t\r\n]*")


class NotACallError(Exception):
    """The text is not a call, or not a complete one."""


class CallText:
    """Text that arrives in pieces, from which calls are read.

    Attributes:
        accepted: parts of accepted calls, until the caller removes them.
    """

    def __init__(self) -> None:
        self.accepted: list[Part] = []
        self._text = ""
        self._begin = 0  # start of the text that is read and not accepted
        self._at = 0  # end of the text that is read
        self._earlier: list[str] = []  # pieces of unaccepted text before `_text`; only `rewind` joins them
        self._ended = False

    def feed(self, text: str) -> None:
        """Append the next piece of text."""
        if self._begin < self._at:
            self._earlier.append(self._text[self._begin : self._at])
        self._text = self._text[self._at :] + text
        self._begin = self._at = 0

    def end(self) -> None:
        """Mark the end of the text."""
        self._ended = True

    def before(self, begins: Markers) -> tuple[str, str | None]:
        """Read and return the text before the next call, and the one of `begins` that starts the call.

        Without a call, return (the text that cannot start a call, None).
        """
        at = self._at
        if (found := begins.find(self._text, at)) is not None:
            self._begin, self._at = found
            return self._text[at : self._begin], self._text[self._begin : self._at]
        self._begin = self._at = len(self._text) if self._ended else begins.started(self._text, at)
        return self._text[at : self._at], None

    def rewind(self, content: int) -> str:
        """Return the first `content` characters of the unaccepted text; the rest will be read again."""
        if self._earlier:
            self._text = "".join(self._earlier) + self._text[self._begin :]
            self._earlier.clear()
            self._begin = 0
        returned = self._text[self._begin : self._begin + content]
        self._begin = self._at = self._begin + len(returned)
        return returned

    def length(self) -> int:
        """Return the length of the text that is read and not accepted."""
        return sum(map(len, self._earlier)) + self._at - self._begin

    def accept(self, parts: Sequence[Part]) -> None:
        """Accept the text read so far as `parts`."""
        self.accepted += parts
        self._earlier.clear()
        self._begin = self._at

    def spaces(self) -> Reading[None]:
        """Read optional white space."""
        yield from self.run(_SPACES)

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Read as many characters as match; the pattern must be a repeated character set."""
        run: list[str] = []
        while True:
            found = characters.match(self._text, self._at)
            run.append(self._take(self._at if found is None else found.end()))
            if self._at < len(self._text) or self._ended:
                return "".join(run)
            yield

    def next(self) -> Reading[str]:
        """Return the next character without reading it; an empty string at the end of the text."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def one(self) -> Reading[str]:
        """Read one character.

        Raises:
            NotACallError: the text has ended.
        """
        if not (yield from self.next()):
            raise NotACallError
        return self._take(self._at + 1)

    def text(self, *texts: str) -> Reading[str]:
        """Read the one of `texts` that follows; none may be a prefix of another.

        Raises:
            NotACallError: none follows.
        """
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    return self._take(self._at + len(text))
            if self._ended or not any(map(self._may_become, texts)):
                raise NotACallError
            yield

    def closing(self, text: str) -> Reading[None]:
        """Read white space and `text`, which closes a complete call.

        If all text ends there, `text` may be missing or cut off: models may omit it at the end of an answer.

        Raises:
            NotACallError: something else follows.
        """
        yield from self.spaces()
        while not (self._ended and self._may_become(text)):
            if self._text.startswith(text, self._at):
                self._take(self._at + len(text))
                return
            if not self._may_become(text):
                raise NotACallError
            yield
        self._take(len(self._text))

    def until(self, markers: Markers) -> Reading[tuple[str, str]]:
        """Read the text before the first of `markers`, and that marker.

        Raises:
            NotACallError: none follows.
        """
        before: list[str] = []
        while (found := markers.find(self._text, self._at)) is None:
            before.append(self._take(markers.started(self._text, self._at)))
            if self._ended:
                raise NotACallError
            yield
        begin, end = found
        before.append(self._take(begin))
        return "".join(before), self._take(end)

    def json(self, started: str = "") -> Reading[str]:
        """Read an object or array, and return its text; `started` is the part of it that has been read.

        Raises:
            NotACallError: none follows, or it is incomplete.
        """
        scanner, pieces = JSONScanner(), [started]
        scanner.feed(started)
        while True:
            try:
                pieces.append(self._take(scanner.feed(self._text, self._at)))
            except NotJSONError as error:
                self._take(error.args[0])
                raise NotACallError from None
            if scanner.ended:
                return "".join(pieces)
            if self._ended:
                raise NotACallError
            yield

    def _may_become(self, text: str) -> bool:
        """Return whether all unread text is a proper prefix of `text`."""
        ahead = len(self._text) - self._at
        return ahead < len(text) and self._text.endswith(text[:ahead])

    def _take(self, end: int) -> str:
        text, self._at = self._text[self._at : end], end
        return text
