"""Reports each kernel that is compiled, which takes seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watch_compilations(on_compiled: Callable[[], None]) -> Iterator[list[str]]:
    """Calls `on_compiled` for each kernel that Triton compiles inside; not for those that its cache on disk has.

    Yields:
        The names of what has been compiled so far.
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
