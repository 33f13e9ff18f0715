"""Stop strings: they end the text, and never leak into a stream.

The string that is completed first ends the text, and of two completed at once the longer: so the result does not
depend on how the text was cut into deltas.

Each character is looked at once for each stop string, however long that is (Knuth, Morris, Pratt): what is remembered
of the text so far is how much of the stop string its end may be the beginning of.
"""

from __future__ import annotations

import functools


class StopStrings:
    """Watches a growing text for any of `stop`, holding back what may become one.

    Args:
        include: the stop string is part of the text.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._watches = [_Watch(string) for string in stop]
        self._include = include
        self._held = ""

    def add(self, text: str, watch: bool = True) -> tuple[str, str | None]:
        """Takes in new `text`.

        Args:
            watch: whether a stop string may end in this text; one that ends later may begin in it all the same.

        Returns:
            (text that can be emitted, the stop string that ended it or None).
        """
        if not self._watches:
            return text, None
        before = len(self._held)
        self._held += text
        ends = [(end, -len(each.stop), each.stop) for each in self._watches if (end := each.add(text, watch))]
        if ends:
            end, _, stop = min(ends)
            emitted, self._held = self._held[: before + end - (0 if self._include else len(stop))], ""
            return emitted, stop
        split = len(self._held) - max(each.started for each in self._watches)
        emitted, self._held = self._held[:split], self._held[split:]
        return emitted, None

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


class _Watch:
    """Watches for one stop string.

    Attributes:
        started: how many of its characters the text ends with, as its beginning.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.started = 0

    def add(self, text: str, watch: bool) -> int:
        """Where in `text` the stop string is first completed: the position after it; 0: nowhere."""
        stop, borders = self.stop, _borders(self.stop)
        position, started = 0, self.started
        while position < len(text):
            if not started:  # nearly always: then the search is the string's own
                position = text.find(stop[0], position)
                if position < 0:
                    break
            while started and stop[started] != text[position]:
                started = borders[started - 1]
            started += stop[started] == text[position]
            position += 1
            if started == len(stop):
                if watch:
                    return position
                started = borders[-1]
        self.started = started
        return 0


@functools.lru_cache(maxsize=256)
def _borders(string: str) -> list[int]:
    """For each of its beginnings, the length of the longest shorter beginning that it also ends with."""
    borders = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length and string[position] != string[length]:
            length = borders[length - 1]
        length += string[position] == string[length]
        borders[position] = length
    return borders
