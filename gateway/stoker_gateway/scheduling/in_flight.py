"""The requests of one model that were sent to its servers and have not ended: exactly, by what is reported of each, and
corrected by what Envoy counts.

Envoy's count is needed for two things. A picker that replaces one that was killed knows nothing of the requests that
its predecessor sent. And where it is unknown whether Envoy has read a request's route, its end may never be reported.
"""

from __future__ import annotations

import math
from typing import Final

#: Seconds that a decision may be on its way to Envoy.
ON_THE_WAY_S: Final = 2.0
#: Seconds between two counts of 0 that show that nothing is under way. Envoy waits at most 10 ms before a retry, and
#: counts a request nowhere meanwhile.
_APART_S: Final = 0.2


class InFlight:
    """Counts the requests of one model. Used by one thread.

    Args:
        now: when this began to count. Requests may have been sent before.
    """

    def __init__(self, now: float) -> None:
        self._sent: dict[int, float] = {}  # by the number of the pick, when it was sent; the oldest first
        self._last_sent = now
        # Requests that were sent before, at most; None: not known yet.
        self._earlier: int | None = None
        self._zero_since = math.inf
        self._zero_until = -math.inf

    def __len__(self) -> int:
        return len(self._sent) + (self._earlier or 0)

    @property
    def needs_count(self) -> bool:
        """Whether the number is not known without Envoy's count."""
        return self._earlier is None or self._earlier > 0

    def sent(self, number: int, now: float) -> None:
        """A request was sent."""
        self._sent[number] = now
        self._last_sent = now

    def ended(self, number: int) -> None:
        """A request has ended, or was not sent after all. Unknown ones are ignored."""
        self._sent.pop(number, None)

    def counted(self, active: int, asked_at: float) -> None:
        """Envoy has so many of its requests under way, or counted them after `asked_at`."""
        if active:
            self._zero_since, self._zero_until = math.inf, -math.inf
        else:
            self._zero_since = min(self._zero_since, asked_at)
            self._zero_until = asked_at
        others = max(0, active - len(self._sent))
        self._earlier = others if self._earlier is None else min(self._earlier, others)
        if self._zero_until - self._zero_since >= _APART_S:
            for number in [each for each, at in self._sent.items() if at <= self._zero_since - ON_THE_WAY_S]:
                del self._sent[number]

    def is_none(self) -> bool:
        """Whether none is under way for certain: none is known, and Envoy's count was 0 since the last decision must
        have reached it."""
        settled = self._last_sent + ON_THE_WAY_S
        return not self._sent and self._zero_until - max(self._zero_since, settled) >= _APART_S
