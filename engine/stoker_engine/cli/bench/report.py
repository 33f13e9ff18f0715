"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker_common.errors import ArgumentError

_WIDTH = 50


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the `percent`-th percentile, linearly interpolated between neighbours (numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary(name: str, seconds: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles of times, in milliseconds, under vLLM's names such as
    ``mean_{name}_ms``; empty if there are no times."""
    if not seconds:
        return {}
    times = [1000 * value for value in seconds]
    figures = {
        f"mean_{name}_ms": statistics.fmean(times),
        f"median_{name}_ms": statistics.median(times),
        f"std_{name}_ms": statistics.pstdev(times),
    }
    return figures | {f"p{percent:g}_{name}_ms": percentile(times, percent) for percent in percents}


def print_table(title: str, rows: Mapping[str, Any]) -> None:
    """Print one result per line; a row with the value None starts a section."""
    print(f" {title} ".center(_WIDTH, "="))
    for label, value in rows.items():
        if value is None:
            print(label.center(_WIDTH, "-"))
        else:
            print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")
    print("=" * _WIDTH)


def write_json(path: str | None, figures: Mapping[str, Any]) -> None:
    """Write `figures` to `path`, unless it is None.

    Raises:
        ArgumentError: the file cannot be written.
    """
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise ArgumentError("--output-json", f"cannot write {path}: {error.strerror}") from error


def percents(text: str, flag: str) -> list[float]:
    """Parse ``"50,99"`` into [50, 99].

    Raises:
        ArgumentError: `text` is not a list of percentages.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ArgumentError(flag, f"{text!r} is not a list of percentages such as 50,90,99")
    return values
