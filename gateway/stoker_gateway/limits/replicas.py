"""Which replicas of the gateway decide about which keys, and how much of a limit they may give. Pure.

Each key has an owner among the replicas that reach each other, whom the others ask. Together these may give as large a
part of each limit as they are of all replicas: cut off from each other, each side has its part. A replica that is not
heard keeps its part, since it may be serving others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import islice

from stoker_gateway.limits.rate_limit import LimitShare
from stoker_gateway.scheduling.rendezvous import Rendezvous


class View:
    """What one replica sees.

    Args:
        me: itself.
        reached: the others that it reaches.
        number: how many there are, itself and those that it does not reach included.
    """

    def __init__(self, me: str, reached: Iterable[str] = (), number: int = 1) -> None:
        self.me = me
        self.reached = frozenset(reached) - {me}
        self.number = max(number, len(self.reached) + 1)
        self._rendezvous = Rendezvous({me, *self.reached})
        #: A key's owner, and who comes next: another replica that knows what the owner's clients use, if there is one.
        self.order = lru_cache(maxsize=4096)(self._order)

    @property
    def share(self) -> LimitShare:
        """What those who reach each other may give."""
        return LimitShare(len(self.reached) + 1, self.number)

    @property
    def share_alone(self) -> LimitShare:
        """What it may give without asking anybody."""
        return LimitShare(1, self.number)

    def owner(self, key_id: str) -> str:
        """Who decides about a key."""
        return self.order(key_id)[0]

    def _order(self, key_id: str) -> tuple[str, ...]:
        return tuple(islice(self._rendezvous.order(key_id.encode()), 2))
