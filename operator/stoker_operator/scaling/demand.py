"""How much of an endpoint's metric there is that replicas are needed for.

The sum of a metric is smoothed, since it is sampled much more often than HPA does: the highest of many samples would
keep replicas that no sustained load needs. Requests that wait count at once, except those that will not wait
any more once a new replica could take them:

- while replicas start, only what the backlog has grown by within a short window counts, since the rest waits for
  these replicas. A constant load thus needs a constant number of replicas, however slowly they start;
- while the backlog shrinks, what is computed within the start-up time does not count.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from stoker_common.scaling.signals import Metric, Signals

#: Over how many seconds the metric's mean is taken.
MEAN_SECONDS: Final = 60.0
#: Over how many seconds the backlog's growth is measured: a share of the start-up time within bounds. What grows in the
#: meantime must be caught up with, so slow starts need more replicas.
GROWTH_SHARE: Final = 0.1
MIN_WINDOW_SECONDS: Final = 10.0
MAX_WINDOW_SECONDS: Final = 60.0
#: A backlog counts if it lasts so many seconds: a pod's short queue beside free slots of others needs no replica.
LASTING_SECONDS: Final = 1.0


class Demand:
    """The demand of one endpoint, in units of its metric."""

    def __init__(self) -> None:
        self._served: deque[tuple[float, float]] = deque()  # when how much was in service
        self._backlogs: deque[tuple[float, float]] = deque()  # when how much waited
        self._started_at = -math.inf  # when a replica was last seen to start

    def update(self, signals: Signals, metric: Metric, is_starting: bool, start_seconds: float, now: float) -> float:
        """Add a sample.

        Args:
            signals: what is reported now.
            metric: of which metric.
            is_starting: whether replicas start.
            start_seconds: how long a replica takes to start.
            now: monotonic seconds, not before the last update.

        Returns:
            How much of the metric new replicas must be able to take.
        """
        if is_starting:
            self._started_at = now
        served, backlog = signals.measure(metric)
        self._served.append((now, served))
        while self._served[0][0] < now - MEAN_SECONDS:
            self._served.popleft()
        self._backlogs.append((now, backlog))
        window = min(max(MIN_WINDOW_SECONDS, GROWTH_SHARE * start_seconds), MAX_WINDOW_SECONDS)
        while self._backlogs[0][0] < now - window:
            self._backlogs.popleft()
        mean = math.fsum(sample for _, sample in self._served) / len(self._served)
        lasting = min(waited for time, waited in self._backlogs if time >= now - LASTING_SECONDS)
        counted = self._counted(max(lasting, float(signals.held)), start_seconds, window, now)
        return max(mean, served + counted) if counted > 0 else mean

    def _counted(self, backlog: float, start_seconds: float, window: float, now: float) -> float:
        """The part of the backlog that needs more replicas."""
        if now - self._started_at <= window:
            return backlog - min(earlier for _, earlier in self._backlogs)
        time, earlier = self._backlogs[0]
        shrinks = max(0.0, earlier - backlog) / (now - time) if now > time else 0.0
        return max(0.0, backlog - shrinks * start_seconds)


def has_missing_engines(signals: Signals, metric: Metric, ready: int) -> bool:
    """Whether the metric comes from engines, and fewer of them report than are ready."""
    if metric == "pendingRequests":
        return False
    return signals.num_reporting() < ready
