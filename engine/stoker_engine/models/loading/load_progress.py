"""How far the loading of weights is."""

from __future__ import annotations

from collections.abc import Callable

#: Is told how many bytes of weights are loaded, and of how many; of 0 where that is not known.
OnProgress = Callable[[int, int], None]


class LoadProgress:
    """Counts what is loaded, and tells whoever wants to know.

    Args:
        on_progress: called whenever loading gets on.
    """

    def __init__(self, on_progress: OnProgress = lambda done, total: None) -> None:
        self._on_progress = on_progress
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        """There are so many bytes to load."""
        self._total = total
        self.tick()

    def add(self, num_bytes: int) -> None:
        """So many more are loaded."""
        self._done += num_bytes
        self.tick()

    def tick(self) -> None:
        """It gets on, though nothing is complete yet."""
        self._on_progress(self._done, self._total)
