"""Ownership of keys among the gateway's replicas, and the share of each limit that they may use. This module does no
I/O.

Each key has an owner among the replicas that reach each other. Together these replicas may use the fraction of each
limit that corresponds to their fraction of all replicas, so after a network partition each side has its share. An
unreachable replica keeps its share, because it may still serve clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import islice

from stoker_gateway.limits.rate_limit import LimitShare
from stoker_gateway.scheduling.rendezvous import Rendezvous


class View:
    """One replica's view of all replicas.

    Args:
        me: identity of this replica.
        reached: identities of the other replicas that this replica reaches.
        number: number of all replicas, including this one and unreachable ones.
    """

    def __init__(self, me: str, reached: Iterable[str] = (), number: int = 1) -> None:
        self.me = me
        self.reached = frozenset(reached) - {me}
        self.number = max(number, len(self.reached) + 1)
        self._rendezvous = Rendezvous({me, *self.reached})
        #: Returns a key's owner and, if any, the owner's successor, to which the owner reports its usage of the key.
        self.order = lru_cache(maxsize=4096)(self._order)

    @property
    def share(self) -> LimitShare:
        """Share of each limit for the replicas that reach each other."""
        return LimitShare(len(self.reached) + 1, self.number)

    @property
    def share_alone(self) -> LimitShare:
        """Share of each limit that this replica may use without asking the owner."""
        return LimitShare(1, self.number)

    def owner(self, key_id: str) -> str:
        """Return the identity of the key's owner."""
        return self.order(key_id)[0]

    def _order(self, key_id: str) -> tuple[str, ...]:
        return tuple(islice(self._rendezvous.order(key_id.encode()), 2))
