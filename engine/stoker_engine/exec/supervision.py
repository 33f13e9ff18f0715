"""How the processes that an engine needs are looked after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker_common.errors import StokerError


@dataclass(frozen=True)
class Supervision:
    """What whoever runs an engine wants of its ranks.

    Attributes:
        step_timeout: seconds after which a step, or loading that does not get on, counts as stuck.
        log_format: of the ranks' logs; see `logs.configure`.
        engine: which of the data-parallel engines this is; None: the only one.
        on_death: called in a thread of its own with what ended the ranks, also while no step runs.
        on_missing_ranks: called while ranks load, whenever one has, with those that have not.
    """

    step_timeout: float = 300.0
    log_format: str = "text"
    engine: int | None = None
    on_death: Callable[[StokerError], None] = lambda _: None
    on_missing_ranks: Callable[[Sequence[int]], None] = lambda _: None

    @property
    def labels(self) -> dict[str, int]:
        """What each line of logs says besides the rank: nothing where there is one engine."""
        return {} if self.engine is None else {"engine": self.engine}
