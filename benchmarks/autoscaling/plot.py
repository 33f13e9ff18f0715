"""Plots the number of pods over time as an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from autoscaling.cluster import Outcome
from autoscaling.loads import Load

WIDTH: Final = 420
HEIGHT: Final = 130
COLORS: Final = {"Stoker": "#d9480f", "HPA": "#1971c2", "Knative": "#868e96"}


def plot(outcomes: Mapping[Load, Mapping[str, Outcome]], loads: Sequence[Load], tick_seconds: float) -> str:
    """Draw one panel per load, two side by side."""
    height = (len(loads) + 1) // 2 * (HEIGHT + 30) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH + 60}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{2 * WIDTH + 60}" height="{height}" fill="white"/>',
    ]
    for column, (name, color) in enumerate(COLORS.items()):
        parts.append(f'<text x="{20 + 90 * column}" y="18" fill="{color}">{name}</text>')
    for number, load in enumerate(loads):
        left, top = 20 + number % 2 * (WIDTH + 20), 40 + number // 2 * (HEIGHT + 30)
        highest = max(max(outcome.counts) for outcome in outcomes[load].values())
        parts.append(f'<text x="{left}" y="{top - 4}">{load.name}, pods (to {highest})</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ced4da"/>')
        for name, color in reversed(COLORS.items()):
            counts = outcomes[load][name].counts
            points = list[str]()
            for index, value in enumerate(counts):
                if index and index != len(counts) - 1 and value == counts[index - 1] == counts[index + 1]:
                    continue
                x = left + min(1.0, index * tick_seconds / load.seconds) * WIDTH
                points.append(f"{x:.1f},{top + HEIGHT * (1 - value / highest):.1f}")
            parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.2" points="{" ".join(points)}"/>')
    return "\n".join([*parts, "</svg>", ""])
