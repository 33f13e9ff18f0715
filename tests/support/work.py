"""How much work something is, counted: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

_LOOK_AT_ENDS = frozenset({"startswith", "endswith"})


def work(function: Callable[[], object]) -> int:
    """Count what a function does, in this thread: each call of a Python or a C function is 1, and a method of a string
    as much more as the string is long, if it may look at all of it."""
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
    """Assert that so much more input is as much more work, and not its square.

    Args:
        function: does something with input of a size.
        small: the size to compare with.
        factor: how much larger the other size is.
    """
    function(small)  # what is computed once is computed now
    less, more = work(lambda: function(small)), work(lambda: function(small * factor))
    assert more < 2 * factor * less + 1000, f"{less} steps for {small}, {more} for {factor} times that"
