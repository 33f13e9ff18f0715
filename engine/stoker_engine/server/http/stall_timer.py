"""Timer that detects too slow progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallTimer:
    """Timer that stops and calls `on_stall` if `progress()` grows by less than `least` within a span of `seconds`.

    Otherwise the next span starts. The cost is one event loop timer per span, and nothing per step of progress.

    Args:
        seconds: length of a span; 0 disables the timer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        least: float,
        progress: Callable[[], int],
        on_stall: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._least = least
        self._progress = progress
        self._on_stall = on_stall
        self._began_at = 0
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Whether a span is running."""
        return self._handle is not None

    def run(self, should_run: bool) -> None:
        """Start a span if `should_run` and none is running; stop the current span if not `should_run`."""
        if not should_run:
            self.stop()
        elif not self.is_running and self._seconds:
            self._began_at = self._progress()
            self._handle = self._loop.call_later(self._seconds, self._look)

    def stop(self) -> None:
        """Stop the current span."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _look(self) -> None:
        self._handle = None
        if self._progress() - self._began_at < self._least:
            self._on_stall()
        else:
            self.run(True)
