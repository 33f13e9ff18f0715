"""Progress of loading weights."""

from __future__ import annotations

from collections.abc import Callable

#: Callback with the loaded bytes and the total bytes of weights; a total of 0 means unknown.
OnProgress = Callable[[int, int], None]


class LoadProgress:
    """Counts loaded bytes and reports them.

    Args:
        on_progress: called after each change of the counts, and by `tick`.
    """

    def __init__(self, on_progress: OnProgress = lambda done, total: None) -> None:
        self._on_progress = on_progress
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        """Set the number of bytes to load."""
        self._total = total
        self.tick()

    def add(self, num_bytes: int) -> None:
        """Add loaded bytes."""
        self._done += num_bytes
        self.tick()

    def tick(self) -> None:
        """Report the counts. Called alone, it shows that loading proceeds within a tensor."""
        self._on_progress(self._done, self._total)
