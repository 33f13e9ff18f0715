"""Progress of compiling Triton kernels, each of which takes seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watch_compilations(on_compiled: Callable[[], None]) -> Iterator[list[str]]:
    """Call `on_compiled` for each kernel that Triton compiles in this context, except those in its disk cache.

    Yields:
        List of the names of the kernels compiled so far; it grows while the context is active.
    """
    names: list[str] = []
    if importlib.util.find_spec("triton") is None:
        yield names
        return
    from triton import knobs

    def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(src.name)
            on_compiled()

    before = knobs.compilation.listener
    knobs.compilation.listener = listen
    try:
        yield names
    finally:
        knobs.compilation.listener = before
