"""Stop strings: they end the text, are no part of it, and never leak into a stream."""

from __future__ import annotations


class StopStrings:
    """Watches a growing text for any of `stop`, holding back what may become one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Takes in new `text`.

        Returns:
            (text that can be told, the stop string that ended it or None).
        """
        if not self._stop:
            return text, None
        self._held += text
        found = [(index, stop) for stop in self._stop if (index := self._held.find(stop)) >= 0]
        if found:
            index, stop = min(found)
            told, self._held = self._held[:index], ""
            return told, stop
        keep = max(self._overlap(stop) for stop in self._stop)
        split = len(self._held) - keep
        told, self._held = self._held[:split], self._held[split:]
        return told, None

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that `stop` begins with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
