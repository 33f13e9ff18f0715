"""Stop strings: a complete one ends the text, and is emitted only if requested.

The stop string that is completed first ends the text; of two completed at the same character, the longer one. The
result therefore does not depend on how the text was split into deltas.

Each character is examined in amortised constant time per stop string (Knuth-Morris-Pratt). The state is the length of
the longest prefix of the stop string that the text ends with.
"""

from __future__ import annotations

import functools


class StopStrings:
    """Searches a growing text for any of `stop`, and holds back text that may become part of a stop string.

    Args:
        include: whether the stop string is part of the emitted text.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._watches = [_Watch(string) for string in stop]
        self._include = include
        self._held = ""

    def add(self, text: str, watch: bool = True) -> tuple[str, str | None]:
        """Add `text`.

        Args:
            watch: whether a stop string may end in this text. A stop string that ends later may start in this text in
                either case.

        Returns:
            (text to emit, the stop string that ended it or None).
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
        """Return the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Watch:
    """Searches for one stop string.

    Attributes:
        started: length, in characters, of the longest prefix of the stop string that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.started = 0

    def add(self, text: str, watch: bool) -> int:
        """Return the position after the first completed stop string in `text`; 0 if there is none."""
        stop, borders = self.stop, _borders(self.stop)
        position, started = 0, self.started
        while position < len(text):
            if not started:  # the common case: use the fast search of str
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
    """Return, for each prefix of `string`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length and string[position] != string[length]:
            length = borders[length - 1]
        length += string[position] == string[length]
        borders[position] = length
    return borders
