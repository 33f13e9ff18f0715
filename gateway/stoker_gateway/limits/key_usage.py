"""What is in use of one key's limits."""

from __future__ import annotations

from stoker_gateway.limits.sliding_minute import SlidingMinute


class KeyUsage:
    """What one replica's clients use with one key."""

    __slots__ = ("open", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = SlidingMinute()
        self.tokens = SlidingMinute()
        #: Requests under way.
        self.open = 0

    @property
    def is_nothing(self) -> bool:
        """Whether it can be forgotten."""
        return not (self.open or self.requests.slots or self.tokens.slots)

    def expire(self, now: float) -> None:
        """Leaves out what is older than a minute."""
        self.requests.expire(now)
        self.tokens.expire(now)

    def begin(self, tokens: int, now: float) -> int:
        """A request begins, for which so many tokens are reserved.

        Returns:
            the second in which they count.
        """
        self.requests.add(1, now)
        self.open += 1
        return self.tokens.add(tokens, now)

    def end(self, second: int, reserved: int, used: int, now: float) -> None:
        """A request has ended.

        What it did not use is given back where it was reserved; what it used beyond that counts now, since nobody
        knew of it before.

        Args:
            second: in which its tokens count.
        """
        self.open = max(0, self.open - 1)
        if used < reserved:
            self.tokens.give_back(second, reserved - used)
        elif used > reserved:
            self.tokens.add(used - reserved, now)
