"""Count of a model's active requests, from the start and the end of each request, corrected by Envoy's count.

Envoy's count is needed because a restarted picker does not know the requests that its predecessor sent, and because the
end of a request may never be reported if it is unknown whether Envoy has received the decision.
"""

from __future__ import annotations

import math
from typing import Final

#: Assumed maximum time from a decision until Envoy has received it, in seconds.
ON_THE_WAY_S: Final = 2.0
#: Successive counts of 0 over at least this many seconds prove that no request is active. A single count does not,
#: because Envoy does not count a request while it waits up to 10 ms before a retry.
_APART_S: Final = 0.2


class InFlight:
    """Counts the active requests of one model. Used by one thread.

    Args:
        now: time at which counting begins, in seconds. Earlier requests may be active.
    """

    def __init__(self, now: float) -> None:
        self._sent: dict[int, float] = {}  # number of the pick → time of the decision, oldest first
        self._last_sent = now
        # Estimated number of active requests that were sent before `now`; None means not counted yet.
        self._earlier: int | None = None
        self._zero_since = math.inf
        self._zero_until = -math.inf

    def __len__(self) -> int:
        return len(self._sent) + (self._earlier or 0)

    @property
    def needs_count(self) -> bool:
        """Whether requests that were sent before counting began may be active."""
        return self._earlier is None or self._earlier > 0

    def sent(self, number: int, now: float) -> None:
        """Record that a request was routed."""
        self._sent[number] = now
        self._last_sent = now

    def ended(self, number: int) -> None:
        """Record that a request has ended, or was not sent. Unknown requests are ignored."""
        self._sent.pop(number, None)

    def counted(self, active: int, requested_at: float) -> None:
        """Record Envoy's count of the model's active requests, which was taken at `requested_at` or later."""
        if active:
            self._zero_since, self._zero_until = math.inf, -math.inf
        else:
            self._zero_since = min(self._zero_since, requested_at)
            self._zero_until = requested_at
        others = max(0, active - len(self._sent))
        self._earlier = others if self._earlier is None else min(self._earlier, others)
        if self._zero_until - self._zero_since >= _APART_S:
            for number in [each for each, at in self._sent.items() if at <= self._zero_since - ON_THE_WAY_S]:
                del self._sent[number]

    def is_certainly_idle(self) -> bool:
        """Whether it is certain that no request is active: none is known here, and Envoy's counts were 0 over at least
        `_APART_S` after Envoy must have received the last decision."""
        settled = self._last_sent + ON_THE_WAY_S
        return not self._sent and self._zero_until - max(self._zero_since, settled) >= _APART_S
