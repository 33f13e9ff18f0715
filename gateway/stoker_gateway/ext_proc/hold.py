"""What an endpoint with ``spec.scaling`` holds: requests that wait until one of its servers is ready.

An InferenceEndpoint may have several served names, each with a queue of its own; what they hold is bounded together.
"""

from __future__ import annotations

from stoker_gateway.registry.model_registry import Phase, Scaling
from stoker_gateway.scheduling.drain import Drain


class EndpointHold:
    """The requests that one InferenceEndpoint holds, and whether it holds them. Used from one event loop.

    Args:
        scaling: how the operator scales it.
        max_held, max_bytes: how many requests it holds at most, and bytes of their bodies.
        now: seconds.

    Attributes:
        num_held: requests that were held and still wait.
        held_bytes: of their bodies.
        active_at: when a request for it last came or ended; None: none has.
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
        """The operator says this now."""
        if scaling.start_failure != self.scaling.start_failure:
            self._failed_at = now
        self.scaling = scaling
        self._drain.update(scaling, now)

    def stops(self, now: float) -> bool:
        """Whether none of its requests may be sent, whatever its servers report."""
        return self._drain.stops(now)

    @property
    def stopped_at(self) -> float:
        """Since when none of its requests may be sent, while none may."""
        return self._drain.stopped_at

    def announcement(self, now: float) -> str:
        """The operator's word for which none of its requests is sent; empty: there is none."""
        return self._drain.word(now)

    def start_failed(self, since: float) -> bool:
        """Whether a request that came then is refused where no server is ready, since none starts. A failure that is
        known in another phase than `Phase.ACTIVE` is of an earlier start: it says nothing of requests that come later,
        for which the operator starts servers again."""
        scaling = self.scaling
        return bool(scaling.start_failure) and (scaling.phase is Phase.ACTIVE or since <= self._failed_at)
