"""Whether an endpoint's requests may be sent, according to the phase and the drain id in its status.

Before the operator removes an endpoint's last servers, it sets the phase to `Phase.DRAINING`, with a new drain id. The
gateway then sends none of the endpoint's requests. A drain id expires after `DRAIN_VALID_S`, so an operator that fails
in this phase stops traffic only for a limited time.
"""

from __future__ import annotations

from typing import Final

from stoker_gateway.registry.model_registry import Phase, Scaling

#: Seconds for which a drain id is valid, by this process's clock, since the id was first seen. The operator removes
#: servers at most 15 s after it sets the id.
DRAIN_VALID_S: Final = 30.0


class Drain:
    """Drain state of one endpoint. Used by one thread.

    Attributes:
        stopped_at: time since which no request may be sent, in seconds; valid only while `stops` returns True.
    """

    def __init__(self) -> None:
        self._phase = Phase.ACTIVE
        self._drain_id = ""
        self._since = 0.0
        self.stopped_at = 0.0

    def update(self, scaling: Scaling, now: float) -> None:
        """Set the phase and the drain id of the endpoint's current status."""
        stopped = self.stops(now)
        if scaling.phase is Phase.DRAINING and (self._phase is not Phase.DRAINING or scaling.drain != self._drain_id):
            self._since = now
        self._phase, self._drain_id = scaling.phase, scaling.drain
        if self.stops(now) and not stopped:
            self.stopped_at = now

    def stops(self, now: float) -> bool:
        """Whether requests must not be sent."""
        return self._phase is Phase.ZERO or self._is_draining(now)

    def drain_id(self, now: float) -> str:
        """Return the operator's last drain id while requests must not be sent; otherwise an empty string."""
        return self._drain_id if self.stops(now) else ""

    def _is_draining(self, now: float) -> bool:
        return self._phase is Phase.DRAINING and now - self._since < DRAIN_VALID_S
