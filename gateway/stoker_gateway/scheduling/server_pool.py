"""The servers of one endpoint: which are ready, full or failing, and the load of each (`load.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from stoker_gateway.scheduling.load import Load, ServerLoad
from stoker_gateway.scheduling.prefix_index import PrefixIndex
from stoker_gateway.scheduling.rendezvous import Rendezvous

#: Seconds for which a server counts as failing after a failure: doubled with each further one, up to the maximum.
FAILED_S: Final = 1.0
LONGEST_FAILED_S: Final = 30.0

#: Number of requests that a server of a careful pool may get when it becomes ready, until it reports again.
FIRST_REQUESTS: Final = 8


@dataclass
class PooledServer:
    """State of a server.

    Attributes:
        polled_at: `PollResult.sent_at` of its last report; negative infinity before the first.
        failures: number of failures since the start of the last poll that found it ready.
        failed_at, failed_until: time of the last failure, and time until which it counts as failing.
        allowance: maximum number of requests that its last report does not include; None means unlimited.
    """

    load: Load = field(default_factory=Load)
    polled_at: float = -math.inf
    failures: int = 0
    failed_at: float = -math.inf
    failed_until: float = -math.inf
    allowance: int | None = None


class ServerPool:
    """Tracks the state of servers, from their reports and the results of requests. Used by one thread.

    Args:
        max_blocks: maximum number of prompt blocks in the prefix index.
        max_waiting: see `PickerSettings`.

    Attributes:
        num_ready: number of ready servers.
        sequences: estimated number of requests at all ready servers.
        careful: whether a server gets requests only after it has reported that it is ready, and at first a limited
            number, which grows with reports without waiting requests. So the first server that starts does not get all
            waiting requests.
        backlog: whether requests wait in the gateway's queue.
    """

    def __init__(self, max_blocks: int, max_waiting: float) -> None:
        self._max_waiting = max_waiting
        self._servers: dict[str, PooledServer] = {}
        self._index = PrefixIndex(max_blocks)
        self._ready = Rendezvous(())
        self._ready_mask = 0
        self.sequences = 0.0
        self.num_ready = 0
        #: Whether no server had room at the last check. Each report resets it, and a request's end that leaves room.
        self._all_full = False
        self.careful = False
        self.backlog = False

    @property
    def num_blocks(self) -> int:
        """Number of prompt blocks in the prefix index."""
        return len(self._index)

    def set_servers(self, addresses: Iterable[str], now: float) -> None:
        """Set the servers. Until they report, new servers count as ready and idle or, in a careful pool, as not
        ready."""
        current = dict.fromkeys(addresses)
        for departed in [server for server in self._servers if server not in current]:
            del self._servers[departed]
            self._index.remove_server(departed)
        for server in current:
            if server not in self._servers:
                unknown = ServerLoad(ready=False, counted=False) if self.careful else ServerLoad()
                self._servers[server] = PooledServer(Load(unknown))
                self._index.add_server(server)
        self._count_ready()

    def observe(self, server: str, load: ServerLoad, sent_at: float, now: float) -> None:
        """Record a server's report, with `PollResult.sent_at`. Unknown servers and outdated reports are ignored."""
        known = self._servers.get(server)
        if known is None or sent_at < known.polled_at:
            return
        known.polled_at = sent_at
        self._all_full = False
        was_ready = known.load.reported.ready
        before = known.load.sequences
        known.load.update(load, sent_at)
        if load.ready and sent_at >= known.failed_at:
            known.failures, known.failed_until = 0, -math.inf
        if load.ready and not was_ready:
            self._index.add_server(server)  # perhaps a new process, whose cache is empty
            known.allowance = FIRST_REQUESTS if self.careful else None
        elif known.allowance is not None:
            known.allowance = self._next_allowance(known.allowance, load)
        if load.ready != was_ready:
            self._count_ready()
        elif was_ready:
            self.sequences += known.load.sequences - before

    def _next_allowance(self, allowance: int, load: ServerLoad) -> int | None:
        """Return a server's next allowance, within bounds: half if requests wait at the server, else double or, without
        a backlog, finally unlimited."""
        if load.waiting > 0:
            return max(FIRST_REQUESTS, allowance // 2)
        if allowance >= self._max_waiting and not self.backlog:
            return None
        return min(2 * allowance, max(FIRST_REQUESTS, int(self._max_waiting)))

    def has_server(self, now: float) -> bool:
        """Whether any server is ready and not failing."""
        return self.num_ready > 0 and any(
            known.load.reported.ready and known.failed_until <= now for known in self._servers.values()
        )

    def states(self) -> Iterator[tuple[str, PooledServer]]:
        """Iterate over the servers' addresses and states."""
        return iter(self._servers.items())

    def ended(self, number: int, tried: Sequence[str], now: float) -> None:
        """Record that the request of a pick has ended.

        Args:
            number: number of the pick.
            tried: servers that the request was sent to, in order. Only the last can have answered; unknown ones are
                ignored.
        """
        for server in dict.fromkeys(tried):
            known = self._servers.get(server)
            if known is None:
                continue
            before = known.load.sequences
            # If the request is not in `sent`, the last report includes it only if it was sent before the poll, and a
            # retry may be sent later.
            if server == tried[-1] and (number in known.load.sent or number <= known.polled_at * 1e6):
                known.load.end(number, now)
            else:
                known.load.cancel(number)
            if known.load.reported.ready:
                self.sequences += known.load.sequences - before
            if not self._is_full(server):
                self._all_full = False

    def failed(self, server: str, now: float) -> None:
        """Record that a server failed at `now`; it counts as failing for a while. Unknown servers, and failures before
        `polled_at`, are ignored."""
        known = self._servers.get(server)
        if known is not None and now >= known.polled_at:
            known.failed_at = now
            known.failed_until = now + min(LONGEST_FAILED_S, FAILED_S * 2 ** min(known.failures, 10))
            known.failures += 1

    def _has_room(self, server: str, now: float) -> bool:
        """Update a ready server's load to `now`, and return whether it is neither failing nor full."""
        known = self._servers[server]
        before = known.load.sequences
        known.load.pass_time(now)
        self.sequences += known.load.sequences - before
        return known.failed_until <= now and not self._is_full(server)

    def _is_full(self, server: str) -> bool:
        known = self._servers[server]
        if known.allowance is not None and self.careful:
            return known.load.reported.waiting > 0 or len(known.load.sent) >= known.allowance
        return known.load.is_full(self._max_waiting)

    def _count_ready(self) -> None:
        """Recompute the set of ready servers."""
        ready = {name: known.load for name, known in self._servers.items() if known.load.reported.ready}
        self._ready = Rendezvous(ready)
        self._ready_mask = self._index.mask(ready)
        self.sequences = sum(load.sequences for load in ready.values())
        self.num_ready = len(ready)
        self._all_full = False
