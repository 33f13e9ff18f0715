"""The demand of an endpoint: the amount of its metric from which the number of replicas is computed.

The sum of the metric is averaged, because it is sampled much more often than by HPA: the maximum of many samples would
keep replicas that no sustained load needs. Waiting requests count at once, except those that will no longer wait when a
new replica could take them:

- while replicas start, only the backlog's growth within a short window counts, because the rest waits for these
  replicas. A constant load thus needs a constant number of replicas, however slowly they start;
- while the backlog shrinks, requests that will be computed within the start-up time do not count.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from stoker_common.scaling.signals import Metric, Signals

#: Window of the metric's mean, in seconds.
MEAN_SECONDS: Final = 60.0
#: Window in which the backlog's growth is measured: a fraction of the start-up time within bounds, in seconds. The
#: growth during a start must be caught up with, so slow starts need more replicas.
GROWTH_SHARE: Final = 0.1
MIN_WINDOW_SECONDS: Final = 10.0
MAX_WINDOW_SECONDS: Final = 60.0
#: Smallest duration of a backlog that counts, in seconds: a short queue of one pod beside free slots of others needs no
#: replica.
LASTING_SECONDS: Final = 1.0


class Demand:
    """Computes the demand of one endpoint from samples: the total of its metric over all replicas."""

    def __init__(self) -> None:
        self._served: deque[tuple[float, float]] = deque()  # (time, the running part of the metric)
        self._backlogs: deque[tuple[float, float]] = deque()  # (time, the waiting part of the metric)
        self._started_at = -math.inf  # last time at which a replica was starting

    def update(self, signals: Signals, metric: Metric, is_starting: bool, start_seconds: float, now: float) -> float:
        """Add a sample.

        Args:
            signals: the current reports.
            metric: name of the metric.
            is_starting: whether replicas are starting.
            start_seconds: start-up time of a replica, in seconds.
            now: monotonic time in seconds, not before the last update.

        Returns:
            The demand.
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
        """Return the part of the backlog that needs more replicas."""
        if now - self._started_at <= window:
            return backlog - min(earlier for _, earlier in self._backlogs)
        time, earlier = self._backlogs[0]
        shrinks = max(0.0, earlier - backlog) / (now - time) if now > time else 0.0
        return max(0.0, backlog - shrinks * start_seconds)


def has_missing_engines(signals: Signals, metric: Metric, ready: int) -> bool:
    """Return whether the metric comes from engines, and fewer of them report than are ready."""
    if metric == "pendingRequests":
        return False
    return signals.num_reporting() < ready
