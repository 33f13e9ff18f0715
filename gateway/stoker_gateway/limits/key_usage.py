"""Usage that counts against one key's limits."""

from __future__ import annotations

from stoker_gateway.limits.sliding_minute import SlidingMinute


class KeyUsage:
    """Usage of one key by the clients of one replica."""

    __slots__ = ("open", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = SlidingMinute()
        self.tokens = SlidingMinute()
        #: Number of active requests.
        self.open = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no usage, so that the object can be dropped."""
        return not (self.open or self.requests.slots or self.tokens.slots)

    def expire(self, now: float) -> None:
        """Drop usage outside the window of `SlidingMinute`."""
        self.requests.expire(now)
        self.tokens.expire(now)

    def begin(self, tokens: int, now: float) -> int:
        """Record the start of a request and reserve its tokens.

        Returns:
            The second to which the tokens were added.
        """
        self.requests.add(1, now)
        self.open += 1
        return self.tokens.add(tokens, now)

    def end(self, second: int, reserved: int, used: int, now: float) -> None:
        """Record the end of a request.

        Unused tokens of the reservation are subtracted from its second. Tokens beyond the reservation are added at
        `now`.

        Args:
            second: second of the reservation, from `begin`.
            reserved: number of reserved tokens.
            used: number of tokens that the request used.
        """
        self.open = max(0, self.open - 1)
        if used < reserved:
            self.tokens.release(second, reserved - used)
        elif used > reserved:
            self.tokens.add(used - reserved, now)
