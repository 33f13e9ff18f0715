"""A log line on the throughput every 10 s while there is work. Without work no timer runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from stoker_engine.core.step_report import SchedulerStats, StepReport

logger = logging.getLogger("stoker_engine.throughput")

INTERVAL_S = 10.0


class ThroughputLog:
    """Sums up the steps of all engines between two lines. The first step starts the timer.

    Args:
        clock: returns seconds; only differences are used.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._prompt_tokens = self._new_tokens = 0
        self._stats: dict[int, SchedulerStats] = {}  # by engine

    def on_step(self, report: StepReport) -> None:
        """Add a step; must be called in an event loop."""
        if self._began is None:
            self._began = self._clock()
            asyncio.get_running_loop().call_later(INTERVAL_S, self.log)
        self._prompt_tokens += report.num_prompt_tokens
        self._new_tokens += report.num_new_tokens
        self._stats[report.engine] = report.stats

    def on_death(self, engine: int) -> None:
        """Drop the statistics of a dead engine, which runs no requests."""
        self._stats.pop(engine, None)

    def log(self) -> None:
        """Write the line and reset the sums."""
        began, stats = self._began, self._stats.values()
        assert began is not None, "logged before a step"
        seconds = max(self._clock() - began, 1e-9)
        queries = sum(each.prefix_cache_queries for each in stats)
        hits = sum(each.prefix_cache_hits for each in stats)
        logger.info(
            "prompt %.1f tokens/s, output %.1f tokens/s, running %d, waiting %d, KV cache %.1f%%, prefix hits %.1f%%",
            self._prompt_tokens / seconds,
            self._new_tokens / seconds,
            sum(each.num_running for each in stats),
            sum(each.num_waiting for each in stats),
            100 * sum(each.kv_cache_usage for each in stats) / max(1, len(stats)),
            100 * hits / queries if queries else 0.0,
        )
        self._began, self._prompt_tokens, self._new_tokens = None, 0, 0
