"""The text of calls, read as it comes.

A format is written down as a generator of `CallText`'s methods, one after the other as the model writes; each waits
(``yield``) where the text that there is does not decide. So where the text is cut into pieces changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Final, TypeVar

from stoker_engine.server.fields.json_text import JSONScanner, NotJSONError
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.parts import Part

T = TypeVar("T")

#: What reads text, and waits for more where it must; the result is what was read.
Reading = Generator[None, None, T]

_SPACES: Final = re.compile(r"[ \t\r\n]*")


class NotACallError(Exception):
    """What was read is no call, or is cut off."""


class CallText:
    """Text that comes in pieces, in which calls are found.

    Attributes:
        accepted: the calls that were read and not yet taken over.
    """

    def __init__(self) -> None:
        self.accepted: list[Part] = []
        self._text = ""
        self._begin = 0  # of what was read and is not accepted
        self._at = 0  # to where it was read
        self._earlier: list[str] = []  # what was read before `_text`, in pieces: a string would be copied for each
        self._ended = False

    def feed(self, text: str) -> None:
        """Takes in a further piece."""
        if self._begin < self._at:
            self._earlier.append(self._text[self._begin : self._at])
        self._text = self._text[self._at :] + text
        self._begin = self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def before(self, begins: Markers) -> tuple[str, str | None]:
        """The text before a call, and what of `begins` it begins with; None: none begins in the text so far."""
        at = self._at
        if (found := begins.find(self._text, at)) is not None:
            self._begin, self._at = found
            return self._text[at : self._begin], self._text[self._begin : self._at]
        self._begin = self._at = len(self._text) if self._ended else begins.started(self._text, at)
        return self._text[at : self._at], None

    def rewind(self, content: int) -> str:
        """The first `content` characters of what was read and is not accepted; the rest is to be read again."""
        if self._earlier:
            self._text = "".join(self._earlier) + self._text[self._begin :]
            self._earlier.clear()
            self._begin = 0
        returned = self._text[self._begin : self._begin + content]
        self._begin = self._at = self._begin + len(returned)
        return returned

    def length(self) -> int:
        """How much was read and is not accepted."""
        return sum(map(len, self._earlier)) + self._at - self._begin

    def accept(self, parts: Sequence[Part]) -> None:
        """What was read so far is `parts`."""
        self.accepted += parts
        self._earlier.clear()
        self._begin = self._at

    def spaces(self) -> Reading[None]:
        """Reads spaces and ends of lines, if there are any."""
        yield from self.run(_SPACES)

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Reads as many characters as match, a set that is repeated."""
        run: list[str] = []
        while True:
            found = characters.match(self._text, self._at)
            run.append(self._take(self._at if found is None else found.end()))
            if self._at < len(self._text) or self._ended:
                return "".join(run)
            yield

    def next(self) -> Reading[str]:
        """The next character, which remains to be read; empty where the text has ended."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def one(self) -> Reading[str]:
        """Reads one character.

        Raises:
            NotACallError: the text has ended.
        """
        if not (yield from self.next()):
            raise NotACallError
        return self._take(self._at + 1)

    def text(self, *texts: str) -> Reading[str]:
        """Reads that one of `texts` which comes; none is the beginning of another.

        Raises:
            NotACallError: none comes.
        """
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    return self._take(self._at + len(text))
            if self._ended or not any(map(self._may_become, texts)):
                raise NotACallError
            yield

    def closing(self, text: str) -> Reading[None]:
        """Reads spaces and `text`, with which a complete call is closed. The end of all text will do as well: a model
        may end its answer there, and nothing is missing.

        Raises:
            NotACallError: something else comes.
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
        """Reads the text before the first of `markers`, and that marker.

        Raises:
            NotACallError: none comes.
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
        """Reads an object or an array, as it is written; `started` of it was read already.

        Raises:
            NotACallError: it is none.
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
        """Whether all that is ahead is a beginning of `text`."""
        ahead = len(self._text) - self._at
        return ahead < len(text) and self._text.endswith(text[:ahead])

    def _take(self, end: int) -> str:
        text, self._at = self._text[self._at : end], end
        return text
