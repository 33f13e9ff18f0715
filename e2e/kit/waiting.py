"""Waiting for what a cluster does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(look: Callable[[], T | None], what: str, timeout: float, every: float = 1) -> T:
    """What `look` returns as soon as that is something.

    Raises:
        AssertionError: it was nothing for `timeout` seconds; `what` says what was waited for.
    """
    deadline = time.monotonic() + timeout
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {what}; last seen: {found!r}")
        time.sleep(every)
