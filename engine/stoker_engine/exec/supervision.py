"""Supervision of an engine's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker_common.errors import StokerError


@dataclass(frozen=True)
class Supervision:
    """Settings and callbacks of the process that supervises an engine's ranks.

    Attributes:
        step_timeout: seconds after which a step, or loading without progress, counts as stuck.
        log_format: see `logs.configure`.
        engine: index of the data-parallel engine; None: the only one.
        on_death: called in a separate thread with the reason when the ranks have ended without request, even if no step
            runs.
        on_missing_ranks: called during loading whenever a rank has loaded, with the ranks that have not.
    """

    step_timeout: float = 300.0
    log_format: str = "text"
    engine: int | None = None
    on_death: Callable[[StokerError], None] = lambda _: None
    on_missing_ranks: Callable[[Sequence[int]], None] = lambda _: None

    @property
    def labels(self) -> dict[str, int]:
        """Fields of log lines besides the rank; empty for a single engine."""
        return {} if self.engine is None else {"engine": self.engine}
