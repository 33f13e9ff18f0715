"""How the processes that an engine needs are looked after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stoker_engine.contract.errors import StokerError


@dataclass(frozen=True)
class Supervision:
    """What whoever runs an engine wants of its ranks.

    Attributes:
        step_timeout: seconds after which a step, or loading that does not get on, counts as stuck.
        log_format: of the ranks' logs; see `logs.configure`.
        labels: what each line of them says besides the rank: which copy of the model it is of.
        on_death: called in a thread of its own with what ended the ranks, also while no step runs.
    """

    step_timeout: float = 300.0
    log_format: str = "text"
    labels: Mapping[str, int] = field(default_factory=dict)
    on_death: Callable[[StokerError], None] = lambda _: None
