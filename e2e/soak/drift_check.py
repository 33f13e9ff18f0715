"""Whether something that is looked at again and again stays where it is.

A process takes what it needs while it warms up: buffers, caches, one block after another of the pool that it was
allowed. What comes later is a leak if it goes on. Whether it does is judged by the slope of Theil and Sen: the median
of the slopes between any two samples, which a third of them being wild would not change (H. Theil, 1950; P. K. Sen,
1968).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

#: Seconds of a process's life before which nothing is judged.
WARM_UP_S = 180
#: Seconds after the warm-up below which a slope means nothing.
ENOUGH_S = 300
#: The time that a slope is stated for.
HALF_AN_HOUR_S = 1800

#: Growth in half an hour that is none: of memory, in bytes or as a share of what there is, whichever is more.
MEMORY_BYTES = 10 * 1024**2
MEMORY_SHARE = 0.05
#: Growth between two moments at rest that is none: of open files, and of threads.
COUNT = 4

Point = tuple[float, float]


def slope(points: Sequence[Point]) -> float:
    """The Theil–Sen slope of (x, y), in units of y per unit of x; 0 of fewer than two x."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2) if x1 != x2]
    return statistics.median(slopes) if slopes else 0.0


def settled(points: Sequence[Point], born: float) -> list[Point]:
    """Those after the warm-up of what was born then; none where they are too few to judge by."""
    later = [(when, value) for when, value in points if when >= born + WARM_UP_S]
    return later if later and later[-1][0] - later[0][0] >= ENOUGH_S else []


def growth(points: Sequence[Point]) -> float:
    """What settled memory (seconds, bytes) grows by in half an hour at this pace, in bytes."""
    return slope(points) * HALF_AN_HOUR_S


def memory_is_flat(points: Sequence[Point]) -> bool:
    """Whether settled memory (seconds, bytes) does not grow."""
    return growth(points) <= max(MEMORY_BYTES, MEMORY_SHARE * statistics.median(value for _, value in points))


def count_is_flat(at_rest: Sequence[int]) -> bool:
    """Whether a count, taken each time that nothing went on, has not grown."""
    return not at_rest or at_rest[-1] - at_rest[0] <= COUNT
