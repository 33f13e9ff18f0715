"""Texts that begin and end something in what a model writes, found wherever the text is cut into pieces."""

from __future__ import annotations

import re


class Markers:
    """Some texts to look for. None may lie within another, so that which one comes first does not depend on pieces.

    Raises:
        ValueError: one lies within another, or is empty.
    """

    def __init__(self, *texts: str) -> None:
        for text in texts:
            if not text or any(text in other for other in texts if other is not text):
                raise ValueError(f"the marker {text!r} is empty or lies within another")
        self._whole = re.compile("|".join(map(re.escape, texts)))
        self._partial = re.compile(f"(?:{'|'.join(map(_beginning, texts))})\\Z")
        self._longest = max(map(len, texts))

    def find(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Where the first of them lies in `text` from `start` on: its begin and end; None: nowhere."""
        found = self._whole.search(text, start)
        return None if found is None else found.span()

    def started(self, text: str, start: int = 0) -> int:
        """Where at the end of `text`, which has none from `start` on, one may have started; the end itself: nowhere."""
        found = self._partial.search(text, max(start, len(text) - self._longest + 1))
        return len(text) if found is None else found.start()


class MarkedText:
    """Text that comes in pieces, read from marker to marker.

    What is fed can be read until no marker is left in it; what may be the beginning of one is kept for the next piece.
    Each character is looked at a bounded number of times, however the text is cut.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0

    def feed(self, text: str) -> None:
        """Takes in a further piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def until(self, markers: Markers) -> tuple[str, str | None]:
        """The text before the first of `markers`, and that marker; both are read then.

        Where there is none, (what cannot be the beginning of one, None).
        """
        at = self._at
        if (found := markers.find(self._text, at)) is not None:
            begin, self._at = found
            return self._text[at:begin], self._text[begin : self._at]
        self._at = markers.started(self._text, at)
        return self._text[at : self._at], None

    def rest(self) -> str:
        """All that is left, when no more text comes, or when no marker matters any more."""
        remainder = self._text[self._at :]
        self._text, self._at = "", 0
        return remainder


def _beginning(text: str) -> str:
    """A pattern of all beginnings of `text` but the whole."""
    pattern = ""
    for character in reversed(text[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern or "(?!)"
