"""Bar charts as plain text, for the flag ``--plot``.

A chart uses block characters if the stream's encoding has them, or else ASCII. It has no colours, so it looks the same
in a terminal, a file and a log. The variable ``COLUMNS``, or else the terminal, determines its width.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TextIO

#: Minimum and maximum width of the longest bar, in characters.
_MIN_BAR: Final = 8
_MAX_BAR: Final = 60
#: Blocks whose widths are 0 to 7 eighths of a character.
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
#: Marks of the parts of stacked bars, as block characters and in ASCII.
_BLOCKS: Final = "█▓▒░▚"
_ASCII: Final = "#=-.%"
#: Maximum number of ranges in a histogram.
_MAX_BINS: Final = 12


class Bar(NamedTuple):
    """One line of a chart: a label, the sizes of the bar's parts, and a text after the bar."""

    label: str
    sizes: tuple[float, ...]
    text: str = ""


@dataclass(frozen=True)
class BarChart:
    """Draws bar charts for one output stream.

    Attributes:
        columns: width of a line in characters.
        ascii_only: whether the encoding has no block characters.
    """

    columns: int
    ascii_only: bool = False

    @classmethod
    def to(cls, stream: TextIO) -> BarChart:
        """Return a `BarChart` for a stream."""
        try:
            (_BLOCKS + _EIGHTHS + "│").encode(stream.encoding or "ascii")
            ascii_only = False
        except (UnicodeEncodeError, LookupError):
            ascii_only = True
        return cls(shutil.get_terminal_size().columns, ascii_only)

    @property
    def limit_mark(self) -> str:
        """The character that marks the limit in stacked bars."""
        return "|" if self.ascii_only else "│"

    def legend(self, names: Sequence[str]) -> str:
        """Return the legend of stacked bars: the mark and the name of each part."""
        return " + ".join(f"{mark} {name}" for mark, name in zip(self._marks, names, strict=False))

    def stacked(self, bars: Sequence[Bar], limit: float) -> list[str]:
        """Return a line for each bar, with a mark at `limit`. A bar longer than twice the limit is cut, and ends with
        ``>``."""
        room = self._room(bars, 1)
        scale = min(max(limit, *(sum(bar.sizes) for bar in bars)), 2 * limit) if bars else limit
        at = round(room * limit / scale) if scale > 0 else room
        lines = []
        for bar in bars:
            cells, end = "", 0.0
            for mark, size in zip(self._marks, bar.sizes, strict=False):
                end += max(size, 0)
                share = min(end / scale, 1.0) if scale > 0 else 0.0
                cells += mark * (round(room * share) - len(cells))
            if sum(bar.sizes) > scale:
                cells = cells[:-1] + ">"
            cells = cells.ljust(room)
            lines.append(self._line(bars, bar, cells[:at] + self.limit_mark + cells[at:]))
        return lines

    def plain(self, bars: Sequence[Bar]) -> list[str]:
        """Return a line for each bar; the longest bar has the full width."""
        room = self._room(bars)
        longest = max((bar.sizes[0] for bar in bars), default=0.0)
        return [
            self._line(bars, bar, self._cells(room * bar.sizes[0] / longest if longest > 0 else 0.0).ljust(room))
            for bar in bars
        ]

    def histogram(self, values: Sequence[float]) -> list[str]:
        """Return a line for each range of values, with the number of values in it."""
        return self.plain([Bar(label, (count,), f"{count:,}") for label, count in bins(values)])

    @property
    def _marks(self) -> str:
        return _ASCII if self.ascii_only else _BLOCKS

    def _cells(self, length: float) -> str:
        """Return a bar. A length greater than 0 is always visible."""
        if self.ascii_only:
            return "#" * max(round(length), int(length > 0))
        eighths = max(round(8 * length), int(length > 0))
        return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()

    def _room(self, bars: Sequence[Bar], num_marks: int = 0) -> int:
        """Return the maximum width of a bar: the rest of the line, but at least `_MIN_BAR` and at most `_MAX_BAR`."""
        label = max((len(bar.label) for bar in bars), default=0)
        text = max((len(bar.text) for bar in bars), default=0)
        return min(max(self.columns - label - text - num_marks - 4, _MIN_BAR), _MAX_BAR)

    @staticmethod
    def _line(bars: Sequence[Bar], bar: Bar, cells: str) -> str:
        label = max(len(each.label) for each in bars)
        return f"{bar.label:>{label}}  {cells}  {bar.text}".rstrip()


def bins(values: Sequence[float]) -> list[tuple[str, int]]:
    """Return ranges of equal width with round bounds, and the number of values in each.

    If the largest value is more than twice the 95th percentile, the last range is wider and contains all values above
    the range of that percentile. Infinite values and NaN are not counted.
    """
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return []
    low, high = ordered[0], ordered[-1]
    if high - low <= 1e-9 * abs(high):
        return [(f"{low:.4g}", len(ordered))]
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    top = p95 if high > 2 * p95 > 2 * low else high
    step = _round_up((top - low) / (_MAX_BINS - 2))
    first, last = math.floor(low / step), math.floor(top / step)
    counts = [0] * (last - first + 2)
    for value in ordered:
        counts[min(math.floor(value / step), last + 1) - first] += 1
    digits = max(0, -math.floor(math.log10(step)))
    edges = [f"{(first + index) * step:,.{digits}f}" for index in range(len(counts) + 1)]
    found = [(f"{start} - {end}", count) for start, end, count in zip(edges, edges[1:], counts, strict=False)]
    above = [(f"{edges[-2]} - {high:,.{digits}f}", counts[-1])] if counts[-1] else []
    return found[:-1] + above


def _round_up(size: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= size)
