"""Holding of requests for an endpoint with scaling until they may be sent to a ready server.

An InferenceEndpoint may have several served names, each with its own queue. The limits of held requests apply to the
names together.
"""

from __future__ import annotations

from stoker_gateway.registry.model_registry import Phase, Scaling
from stoker_gateway.scheduling.drain import Drain


class EndpointHold:
    """Counts the held requests of one InferenceEndpoint, and tracks whether requests may be sent. Used from one event
    loop.

    Args:
        scaling: how the endpoint is scaled.
        max_held, max_bytes: maximum number of held requests, and maximum size of their bodies together.
        now: current time, in seconds.

    Attributes:
        num_held: number of waiting requests that are or were held, including those that now wait for a less busy
            server.
        held_bytes: total size of the bodies of these requests.
        active_at: time at which a request last arrived or ended; None if none has.
    """

    def __init__(self, scaling: Scaling, max_held: int, max_bytes: int, now: float) -> None:
        self.max_held = max_held
        self.max_bytes = max_bytes
        self.num_held = 0
        self.held_bytes = 0
        self.active_at: float | None = None
        self.scaling = scaling
        self._drain = Drain()
        self._failed_at = now
        self.update(scaling, now)

    def update(self, scaling: Scaling, now: float) -> None:
        """Set the endpoint's current scaling."""
        if scaling.start_failure != self.scaling.start_failure:
            self._failed_at = now
        self.scaling = scaling
        self._drain.update(scaling, now)

    def stops(self, now: float) -> bool:
        """Whether the endpoint's requests must not be sent, whatever its servers report."""
        return self._drain.stops(now)

    @property
    def stopped_at(self) -> float:
        """Time since which no request may be sent; valid only while `stops` returns True."""
        return self._drain.stopped_at

    def drain_id(self, now: float) -> str:
        """Return the operator's last drain id while requests must not be sent; otherwise an empty string."""
        return self._drain.drain_id(now)

    def start_failed(self, since: float) -> bool:
        """Whether a request that arrived at `since` is rejected while no server is ready, because servers fail to
        start.

        In a phase other than `Phase.ACTIVE`, the known failure belongs to an earlier start. It does not apply to
        requests that arrived after its report, because the operator starts servers for them again.
        """
        scaling = self.scaling
        return bool(scaling.start_failure) and (scaling.phase is Phase.ACTIVE or since <= self._failed_at)
