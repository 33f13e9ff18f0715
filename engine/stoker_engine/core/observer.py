"""Who watches the engine: the metrics do. Called from the engine's thread, after each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stoker_engine.core.request import Request


@dataclass(frozen=True)
class SchedulerStats:
    """What the metrics say of the scheduler; counters only grow."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        num_tokens: tokens computed.
        num_prompt_tokens: of them, prompt tokens.
        advanced: requests that got a token, finished ones included.
        finished: requests that ended in or just before this step, aborted ones included.
        duration: seconds.
    """

    num_tokens: int
    num_prompt_tokens: int
    advanced: list[Request]
    finished: list[Request]
    duration: float


class Observer(Protocol):
    """Takes notice of what the engine does."""

    def on_step(self, report: StepReport, stats: SchedulerStats) -> None:
        """A step is done; `stats` is the scheduler's state after it."""
        ...
