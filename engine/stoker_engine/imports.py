"""Speeds up imports of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the garbage collector in a block of imports, and freeze the objects that exist afterwards.

    Imports create many permanent objects, which the collector would traverse repeatedly.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
