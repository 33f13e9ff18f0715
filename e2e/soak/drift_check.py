"""Detects whether a repeatedly sampled value drifts.

During warm-up a process allocates what it needs: buffers, caches, blocks of its pool. Growth that continues afterwards
is a leak. It is measured by the Theil–Sen slope: the median of the slopes between any two samples, which is robust
against outliers in up to about 29 % of the samples (H. Theil, 1950; P. K. Sen, 1968).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

#: Warm-up of a process, in seconds; earlier samples are ignored.
WARM_UP_S = 180
#: Shortest time after the warm-up for which a slope is meaningful, in seconds.
ENOUGH_S = 300
#: Time to which a slope is scaled, in seconds.
HALF_AN_HOUR_S = 1800

#: Tolerated growth of memory per half hour, in bytes; or a share of the memory, if that is more.
MEMORY_BYTES = 10 * 1024**2
MEMORY_SHARE = 0.05
#: Tolerated growth of open files and threads between two idle moments.
COUNT = 4

Point = tuple[float, float]


def slope(points: Sequence[Point]) -> float:
    """Return the Theil–Sen slope of (x, y), in units of y per unit of x; 0 for fewer than two x."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2) if x1 != x2]
    return statistics.median(slopes) if slopes else 0.0


def settled(points: Sequence[Point], born: float) -> list[Point]:
    """Return the points after the warm-up of a process started at `born`; none if they are too few."""
    later = [(when, value) for when, value in points if when >= born + WARM_UP_S]
    return later if later and later[-1][0] - later[0][0] >= ENOUGH_S else []


def growth(points: Sequence[Point]) -> float:
    """Return the growth of settled memory (seconds, bytes) per half hour, in bytes."""
    return slope(points) * HALF_AN_HOUR_S


def memory_is_flat(points: Sequence[Point]) -> bool:
    """Return whether settled memory (seconds, bytes) grows no more than tolerated."""
    return growth(points) <= max(MEMORY_BYTES, MEMORY_SHARE * statistics.median(value for _, value in points))


def count_is_flat(at_rest: Sequence[int]) -> bool:
    """Return whether a count, sampled at idle moments, has grown by at most `COUNT`."""
    return not at_rest or at_rest[-1] - at_rest[0] <= COUNT
