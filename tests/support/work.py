"""Counts work, as a measure that is the same on every machine, however busy it is."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

_LOOK_AT_ENDS = frozenset({"startswith", "endswith"})


def work(function: Callable[[], object]) -> int:
    """Count the work of a function in this thread.

    Each call of a Python or C function counts 1; a string method that may scan the string also counts the string's
    length.
    """
    count = 0

    def note(_frame: types.FrameType, event: str, called: Any) -> None:
        nonlocal count
        if event == "call":
            count += 1
        elif event == "c_call":
            count += 1
            of = getattr(called, "__self__", None)
            if isinstance(of, str | bytes | bytearray) and called.__name__ not in _LOOK_AT_ENDS:
                count += len(of)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def assert_linear(function: Callable[[int], object], small: int, factor: int = 4) -> None:
    """Assert that work grows linearly with the input, not quadratically.

    Args:
        function: processes an input of the given size.
        small: smaller size.
        factor: ratio of the larger size to the smaller one.
    """
    function(small)  # fills caches
    less, more = work(lambda: function(small)), work(lambda: function(small * factor))
    assert more < 2 * factor * less + 1000, f"{less} steps for {small}, {more} for {factor} times that"
