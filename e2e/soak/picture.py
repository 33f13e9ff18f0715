"""Plots samples over time as SVG, without a library: a panel per quantity, a line per process, a band per fault.

┌ title ───────────────┐
│  ╱‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾    │ maximum
│ ╱    ▒▒     ▒        │
└──────────────────────┘ 0
 0 min             30 min
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 860, 120
_LEFT, _RIGHT, _TOP, _GAP = 60, 30, 24, 38
#: Palette for colour-blind readers (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

Line = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Lines of one quantity.

    Attributes:
        lines: by name in the legend, lines of (minutes, value); lines of one name have the same colour.
    """

    title: str
    lines: dict[str, list[Line]]


def draw(panels: Sequence[Panel], minutes: float, bands: Iterable[tuple[float, float, str]]) -> str:
    """Draw the panels as one SVG.

    Args:
        minutes: end of the time axis.
        bands: start and end in minutes, and a description that is shown as a tooltip.
    """
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    bands = list(bands)
    for number, panel in enumerate(panels):
        parts += _panel(panel, _TOP + number * (_HEIGHT + _GAP), max(minutes, 1e-9), bands)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: float, minutes: float, bands: list[tuple[float, float, str]]) -> list[str]:
    highest = max((value for lines in panel.lines.values() for line in lines for _, value in line), default=0) or 1
    across, bottom = _WIDTH - _LEFT - _RIGHT, top + _HEIGHT

    def x(minute: float) -> str:
        return f"{_LEFT + across * minute / minutes:.1f}"

    def y(value: float) -> str:
        return f"{bottom - 0.92 * _HEIGHT * value / highest:.1f}"

    parts = [f'<text x="{_LEFT}" y="{top - 6}" font-weight="bold">{escape(panel.title)}</text>']
    for since, until, name in bands:
        wide = max(across * (until - since) / minutes, 1)
        parts.append(
            f'<rect x="{x(since)}" y="{top}" width="{wide:.1f}" height="{_HEIGHT}" fill="#e8e8e8">'
            f"<title>{escape(name)}</title></rect>"
        )
    for value in (0, highest / 2, highest):
        parts.append(f'<path d="M{_LEFT} {y(value)}H{_WIDTH - _RIGHT}" stroke="#ccc" stroke-width="0.5"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value)}" dy="4" text-anchor="end">{value:,.0f}</text>')
    legend = _LEFT + 160.0
    for colour, (name, lines) in zip(_COLOURS, panel.lines.items(), strict=False):
        for line in lines:
            points = " ".join(f"{x(minute)},{y(value)}" for minute, value in line)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        parts.append(f'<text x="{legend:.0f}" y="{top - 6}" fill="{colour}">{escape(name)}</text>')
        legend += 14 + 6.5 * len(name)
    for minute in (0.0, minutes / 2, minutes):
        parts.append(f'<text x="{x(minute)}" y="{bottom + 13}" text-anchor="middle">{minute:.0f} min</text>')
    return parts
