"""Search for marker texts in output that arrives in pieces."""

from __future__ import annotations

import re


class Markers:
    """A set of marker texts. None may contain another, so that the first match does not depend on the pieces.

    Raises:
        ValueError: a marker contains another, or is empty.
    """

    def __init__(self, *texts: str) -> None:
        for text in texts:
            if not text or any(text in other for other in texts if other is not text):
                raise ValueError(f"the marker {text!r} is empty or part of another marker")
        self._whole = re.compile("|".join(map(re.escape, texts)))
        self._partial = re.compile(f"(?:{'|'.join(map(_beginning, texts))})\\Z")
        self._longest = max(map(len, texts))

    def find(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Return (start, end) of the first marker in `text` from index `start` on, or None."""
        found = self._whole.search(text, start)
        return None if found is None else found.span()

    def started(self, text: str, start: int = 0) -> int:
        """Return the index of a partial marker at the end of `text`, or else its length; `text` has no whole marker."""
        found = self._partial.search(text, max(start, len(text) - self._longest + 1))
        return len(text) if found is None else found.start()


class MarkedText:
    """Text that arrives in pieces, read from marker to marker.

    Call `until` until it returns no marker; a possible partial marker at the end of the text is kept for the next
    piece. Each character is examined a bounded number of times, however the text is split.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0

    def feed(self, text: str) -> None:
        """Append the next piece of text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def until(self, markers: Markers) -> tuple[str, str | None]:
        """Read and return the text before the first of `markers`, and that marker.

        Without a marker, return (the text that cannot be the start of one, None).
        """
        at = self._at
        if (found := markers.find(self._text, at)) is not None:
            begin, self._at = found
            return self._text[at:begin], self._text[begin : self._at]
        self._at = markers.started(self._text, at)
        return self._text[at : self._at], None

    def rest(self) -> str:
        """Read and return all remaining text, at the end or when markers no longer matter."""
        remainder = self._text[self._at :]
        self._text, self._at = "", 0
        return remainder


def _beginning(text: str) -> str:
    """Return a pattern of all non-empty proper prefixes of `text`."""
    pattern = ""
    for character in reversed(text[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern or "(?!)"
