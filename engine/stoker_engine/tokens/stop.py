"""Stop strings: they end the text, and never leak into a stream.

The string that is completed first ends the text, and of two completed at once the longer: so the result does not
depend on how the text was cut into deltas.
"""

from __future__ import annotations


class StopStrings:
    """Watches a growing text for any of `stop`, holding back what may become one.

    Args:
        include: the stop string is part of the text.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._stop = stop
        self._include = include
        self._held = ""
        self._ignored = 0  # length of the held text in which no stop string may end

    def add(self, text: str, watch: bool = True) -> tuple[str, str | None]:
        """Takes in new `text`.

        Args:
            watch: whether a stop string may end in this text; one that ends later may begin in it all the same.

        Returns:
            (text that can be told, the stop string that ended it or None).
        """
        if not self._stop:
            return text, None
        self._held += text
        if not watch:
            self._ignored = len(self._held)
        ends = [(end, end - len(stop), stop) for stop in self._stop if (end := self._end(stop)) is not None]
        if ends:
            end, start, stop = min(ends)
            told, self._held = self._held[: end if self._include else start], ""
            return told, stop
        split = len(self._held) - max(self._overlap(stop) for stop in self._stop)
        told, self._held = self._held[:split], self._held[split:]
        self._ignored = max(0, self._ignored - split)
        return told, None

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _end(self, stop: str) -> int | None:
        """Where `stop` is first completed."""
        start = self._held.find(stop, max(0, self._ignored + 1 - len(stop)))
        return None if start < 0 else start + len(stop)

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that `stop` begins with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
