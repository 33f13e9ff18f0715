"""The demand of an endpoint: the amount of its metric from which the number of replicas is computed.

The running part of the metric is averaged, because it is sampled much more often than by HPA: the maximum of many
samples would keep replicas that no sustained load needs. Waiting requests are added at once, except those that will no
longer wait when a new replica could take them:

- while replicas start, only the backlog's growth within a short window is added, because the rest waits for these
  replicas. A constant load thus needs a constant number of replicas, however slowly they start;
- while the backlog shrinks, requests that will be computed within the start-up time are excluded.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from stoker_common.scaling.signals import Metric, Signals

#: Window of the metric's mean, in seconds.
MEAN_SECONDS: Final = 60.0
#: Window in which the backlog's growth is measured, in seconds: a fraction of the start-up time within bounds. More
#: requests gather during a slow start, so it needs more replicas.
GROWTH_SHARE: Final = 0.1
MIN_WINDOW_SECONDS: Final = 10.0
MAX_WINDOW_SECONDS: Final = 60.0
#: Window in seconds whose smallest backlog is used: a short queue of one pod beside free slots of others needs no
#: replica. Requests that the gateway holds are used at once.
LASTING_SECONDS: Final = 1.0


class Demand:
    """Computes the demand of one endpoint from samples of its metric's total over all replicas."""

    def __init__(self) -> None:
        self._served: deque[tuple[float, float]] = deque()  # (time, the running part of the metric)
        self._backlogs: deque[tuple[float, float]] = deque()  # (time, the waiting part of the metric)
        self._started_at = -math.inf  # last time at which a replica was starting

    def update(self, signals: Signals, metric: Metric, is_starting: bool, start_seconds: float, now: float) -> float:
        """Add a sample, and return the demand.

        Args:
            signals: the current reports.
            metric: the metric by which the endpoint is scaled.
            is_starting: whether replicas are starting.
            start_seconds: start-up time of a replica, in seconds.
            now: monotonic time in seconds, not before the last update.
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
        """Return the part of the backlog that needs more replicas: while replicas start, its growth within the window;
        otherwise the part that will still wait when a new replica is ready."""
        if now - self._started_at <= window:
            return backlog - min(earlier for _, earlier in self._backlogs)
        time, earlier = self._backlogs[0]
        shrinks = max(0.0, earlier - backlog) / (now - time) if now > time else 0.0
        return max(0.0, backlog - shrinks * start_seconds)


def has_missing_engines(signals: Signals, metric: Metric, ready: int) -> bool:
    """Return whether the metric comes from engines, and fewer of them have a recent report than replicas are ready."""
    if metric == "pendingRequests":
        return False
    return signals.num_reporting() < ready
