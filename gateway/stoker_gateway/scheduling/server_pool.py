"""The servers of one endpoint: which are ready, full or failing, and what each has to do (`load.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from stoker_gateway.scheduling.load import Load, ServerLoad
from stoker_gateway.scheduling.prefix_index import PrefixIndex
from stoker_gateway.scheduling.rendezvous import Rendezvous

#: For how many seconds a server that failed gets nothing while others do; doubled with each failure, up to the longest.
FAILED_S: Final = 1.0
LONGEST_FAILED_S: Final = 30.0

#: Requests that a server of a careful pool gets after it has started, until it reports again.
FIRST_REQUESTS: Final = 8


@dataclass
class PooledServer:
    """What is known of a server.

    Attributes:
        asked_at: when it was asked what it last said.
        failures: since it last said that it is ready.
        failed_at, failed_until: the last of them, and until when it gets nothing.
        allowance: how many requests it may be sent until it reports again; None: as many as there are.
    """

    load: Load = field(default_factory=Load)
    asked_at: float = -math.inf
    failures: int = 0
    failed_at: float = -math.inf
    failed_until: float = -math.inf
    allowance: int | None = None


class ServerPool:
    """Keeps what is known of servers, from what they report and what became of requests. Used by one thread.

    Args:
        max_blocks: blocks of prompts that are remembered.
        max_waiting: a server where requests wait is full with so many.

    Attributes:
        num_ready: servers that are ready.
        sequences: requests at all of these, as far as is known.
        careful: whether a server gets nothing before it has reported that it is ready, and then a number of requests
            that grows with each report in which none waits. So what waited for the first server is not all sent to it.
        backlog: whether requests wait for servers with room.
    """

    def __init__(self, max_blocks: int, max_waiting: float) -> None:
        self._max_waiting = max_waiting
        self._servers: dict[str, PooledServer] = {}
        self._index = PrefixIndex(max_blocks)
        self._ready = Rendezvous(())
        self._ready_mask = 0
        self.sequences = 0.0
        self.num_ready = 0
        self._all_full = False  # when last looked at, and nothing was heard since
        self.careful = False
        self.backlog = False

    @property
    def num_blocks(self) -> int:
        """Blocks of prompts that are remembered."""
        return len(self._index)

    def set_servers(self, addresses: Iterable[str], now: float) -> None:
        """These are all servers there are. New ones count as ready and idle until they say otherwise; where the pool is
        careful, as not ready."""
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
        """A server was asked at `sent_at`, and says this. Unknown servers and old words are ignored."""
        known = self._servers.get(server)
        if known is None or sent_at < known.asked_at:
            return
        known.asked_at = sent_at
        self._all_full = False
        was_ready = known.load.reported.ready
        before = known.load.sequences
        known.load.update(load, sent_at)
        if load.ready and sent_at >= known.failed_at:
            known.failures, known.failed_until = 0, -math.inf
        if load.ready and not was_ready:
            self._index.add_server(server)  # another process, by the same address
            known.allowance = FIRST_REQUESTS if self.careful else None
        elif known.allowance is not None:
            known.allowance = self._next_allowance(known.allowance, load)
        if load.ready != was_ready:
            self._count_ready()
        elif was_ready:
            self.sequences += known.load.sequences - before

    def _next_allowance(self, allowance: int, load: ServerLoad) -> int | None:
        """What a server may be sent after this report: twice as much while none of its requests waits, else half."""
        if load.waiting > 0:
            return max(FIRST_REQUESTS, allowance // 2)
        if allowance >= self._max_waiting and not self.backlog:
            return None
        return min(2 * allowance, max(FIRST_REQUESTS, int(self._max_waiting)))

    def has_server(self, now: float) -> bool:
        """Whether a server is ready, and did not fail since it last reported."""
        return self.num_ready > 0 and any(
            known.load.reported.ready and known.failed_until <= now for known in self._servers.values()
        )

    def states(self) -> Iterator[tuple[str, PooledServer]]:
        """What is known of each server, by its address."""
        return iter(self._servers.items())

    def ended(self, number: int, tried: Sequence[str], now: float) -> None:
        """The request of a pick has ended.

        Args:
            tried: servers that it was sent to, in order. Only the last can have answered; unknown ones are ignored.
        """
        for server in dict.fromkeys(tried):
            known = self._servers.get(server)
            if known is None:
                continue
            before = known.load.sequences
            # Its last word knows of the request only if it came before: a retry's server may have spoken earlier.
            if server == tried[-1] and (number in known.load.sent or number <= known.asked_at * 1e6):
                known.load.end(number, now)
            else:
                known.load.take_back(number)
            if known.load.reported.ready:
                self.sequences += known.load.sequences - before
            if known.allowance is not None:
                self._all_full = False

    def failed(self, server: str, now: float) -> None:
        """A server did not answer: it gets nothing for a while, unless all have failed. Unknown ones are ignored, and
        what it has said something since."""
        known = self._servers.get(server)
        if known is not None and now >= known.asked_at:
            known.failed_at = now
            known.failed_until = now + min(LONGEST_FAILED_S, FAILED_S * 2 ** min(known.failures, 10))
            known.failures += 1

    def _has_room(self, server: str, now: float) -> bool:
        """Whether a ready server may get requests: it neither fails nor is full, by what is brought up to date."""
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
        """Servers have come or gone, or have started or ceased to be ready."""
        ready = {name: known.load for name, known in self._servers.items() if known.load.reported.ready}
        self._ready = Rendezvous(ready)
        self._ready_mask = self._index.mask(ready)
        self.sequences = sum(load.sequences for load in ready.values())
        self.num_ready = len(ready)
        self._all_full = False
