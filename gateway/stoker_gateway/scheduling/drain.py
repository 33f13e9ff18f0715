"""Whether an endpoint's requests may be sent to its servers, by what the operator announces in its status.

Before the operator removes an endpoint's last servers it announces that, by a new word each time. From then on none of
its requests is sent. An announcement that the operator does not withdraw lapses, so an operator that is gone stops no
traffic for long.
"""

from __future__ import annotations

from typing import Final

from stoker_gateway.registry.model_registry import Phase, Scaling

#: Seconds for which an announcement holds, by this process's own clock, from when it was first seen. The operator
#: removes servers at most 15 s after it.
ANNOUNCED_S: Final = 30.0


class Drain:
    """What was announced for one endpoint. Used by one thread.

    Attributes:
        stopped_at: since when no request may be sent, while none may.
    """

    def __init__(self) -> None:
        self._phase = Phase.ACTIVE
        self._word = ""
        self._since = 0.0
        self.stopped_at = 0.0

    def update(self, scaling: Scaling, now: float) -> None:
        """This is announced now."""
        stopped = self.stops(now)
        if scaling.phase is Phase.DRAINING and (self._phase is not Phase.DRAINING or scaling.drain != self._word):
            self._since = now
        self._phase, self._word = scaling.phase, scaling.drain
        if self.stops(now) and not stopped:
            self.stopped_at = now

    def stops(self, now: float) -> bool:
        """Whether no request may be sent."""
        return self._phase is Phase.ZERO or self._is_announced(now)

    def word(self, now: float) -> str:
        """The word of the announcement that holds; empty: none does."""
        return self._word if self.stops(now) else ""

    def _is_announced(self, now: float) -> bool:
        return self._phase is Phase.DRAINING and now - self._since < ANNOUNCED_S
