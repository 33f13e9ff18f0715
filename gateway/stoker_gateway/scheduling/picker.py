"""Choice of a server: usually the one with most of the prompt in its prefix cache, unless its load outweighs this.

In this order:

- The server that stores a response that the request needs, if that server is ready: no other has the response.
- The session's server: the first one with room in the session's order (`rendezvous.py`), if possible within the balance
  (`SESSION_BALANCE`).
- The server with the least work before the first token, including the request's own prompt (`load.py`), among those
  that received the prompt's prefix (`prefix_scorer.py`) and up to three others. The first of these is the *home*.

A new conversation's order is given by the prompt's first unknown block. Its home is the first server with room, if
possible within the balance (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016). A
prompt of at least one block without a known prefix goes to its home. All pickers compute the same order, so they
usually agree on the home, even if each sees only some turns. If many conversations share a prefix, some new ones go
home although other servers have the prefix, so that one server does not get all of them. The probability falls with the
prefix's length and rises with the number of servers that have it: on average, a new conversation recomputes at most
about `HOME_BYTES` for each of them.

Which servers are ready, full or failing follows from their reports and from the results of requests (`server_pool.py`).
This module has no clock and does no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Final, Literal

from stoker_gateway.scheduling.prefix_scorer import PrefixScorer
from stoker_gateway.scheduling.rendezvous import Rendezvous
from stoker_gateway.scheduling.routing_request import RoutingRequest
from stoker_gateway.scheduling.server_pool import ServerPool

#: Requests at a server, relative to the mean, up to which it is *within the balance*: in general, and for sessions.
BALANCE: Final = 1.25
SESSION_BALANCE: Final = 2.0

#: A server with fewer requests than this is within the balance, whatever the mean is.
FEW: Final = 8

#: Maximum number of servers in a pick: the first, and those for the retry.
MAX_SERVERS: Final = 3

#: The search for servers stops once it has found one with room within the balance and more than this many beyond it.
MAX_LOOKS: Final = 32

#: Weight of a request in the moving average of the prompt bytes that a server has to compute for each request.
USUAL_GAIN: Final = 0.05


@dataclass(frozen=True)
class PickerSettings:
    """Settings of a picker.

    Attributes:
        max_blocks: maximum number of prompt blocks in the prefix index.
        max_waiting: a server with waiting requests is full if these and those sent since its report reach this number.
        retry_after_s: seconds after which a refused request should be sent again.
    """

    max_blocks: int = 500_000
    max_waiting: float = 64
    retry_after_s: float = 1.0


@dataclass(frozen=True)
class Pick:
    """Servers chosen for a request.

    Attributes:
        servers: ``IP:PORT``, the best first; the others, if any, are for a retry.
        why: reason of the choice: ``held`` (stores a response), ``session``, ``prefix``, ``home`` or ``load``.
        cached_share: fraction of the prompt that the first server is known to have received before.
        number: unique number of the pick within its picker: its time in microseconds, or slightly more.
        held_s: seconds that the request waited, if it was held; None otherwise.
    """

    servers: tuple[str, ...]
    why: Literal["held", "session", "prefix", "home", "load"]
    cached_share: float
    number: int = 0
    held_s: float | None = None


@dataclass(frozen=True)
class Refusal:
    """Reason why a request gets no server.

    Attributes:
        kind: ``none``: no server may get the request; ``saturated``: servers that may get it are full; ``not held``: a
            limit of held requests is reached; ``held``: it was held, and waited for the maximum time; ``not started``:
            the endpoint's servers fail to start.
        retry_after_s: seconds after which the request should be sent again.
        held_s: seconds that the request waited, if it was held; None otherwise.
    """

    kind: Literal["none", "saturated", "not held", "held", "not started"]
    retry_after_s: float
    held_s: float | None = None


class EndpointPicker(ServerPool):
    """Chooses among the servers of one endpoint, and counts the requests sent to them. Used by one thread.

    Args:
        identity: name that differs between the pickers of an endpoint, so that they start at different servers when
            they distribute requests that have neither a session nor an unknown block.
    """

    def __init__(self, settings: PickerSettings | None = None, identity: str = "") -> None:
        self._settings = settings or PickerSettings()
        super().__init__(self._settings.max_blocks, self._settings.max_waiting)
        self._prefixes = PrefixScorer(self._index)
        self._usual = 1024.0  # moving average of the bytes of a prompt that a server has to compute
        self._last_number = 0
        start = blake2b(identity.encode(), digest_size=7).digest()  # 7 of the counter's 8 bytes, so it cannot overflow
        self._unknown = count(int.from_bytes(start, "little"))

    def pick(self, request: RoutingRequest, now: float) -> Pick | Refusal:
        """Choose servers for a request and count it for the first one, or refuse it."""
        order, mask = self._ready, self._ready_mask
        if request.subset is not None:
            known = [name for name in request.subset if name in self._servers]
            allowed = [name for name in known if self._servers[name].load.reported.ready]
            order, mask = Rendezvous(allowed), self._index.mask(allowed)
        if not mask:
            return Refusal("none", self._settings.retry_after_s)
        masks = self._prefixes.match(request.chain, mask)
        held_by = request.held_by
        if held_by is not None and held_by in self._servers and self._index.bit(held_by) & mask:
            if self._is_full(held_by):
                return Refusal("saturated", self._settings.retry_after_s)
            return self._send(request, (held_by,), "held", masks, now)
        if request.subset is None and self._all_full:
            return Refusal("saturated", self._settings.retry_after_s)

        key, balance = self._key(request, len(masks)), SESSION_BALANCE if request.session is not None else BALANCE
        candidates = self._with_room(order, key, balance, now)
        holders = (
            self._prefixes.holders(key, masks, lambda server: self._has_room(server, now))
            if request.session is None
            else []
        )
        if not candidates and not holders:
            return self._none_has_room(request, order, key, masks, now)
        if request.session is not None:
            return self._send(request, tuple(candidates), "session", masks, now)
        if not request.chain:
            candidates.sort(key=self._work)
            return self._send(request, tuple(candidates), "load", masks, now)
        if not masks:
            return self._send(request, tuple(candidates), "home", masks, now)

        scorer = self._prefixes
        home = candidates[0] if candidates and scorer.is_new(request.chain, masks) else None
        comes_home = scorer.comes_home(key, masks)

        def cost(server: str) -> tuple[bool, float]:
            return not (comes_home and server == home), self._work(server) - scorer.cached_bytes(server, masks)

        best = sorted(dict.fromkeys(holders + candidates), key=cost)
        first = best[0]
        why: Literal["prefix", "home", "load"] = (
            "home" if first == home else "prefix" if scorer.cached_bytes(first, masks) else "load"
        )
        return self._send(request, tuple(best[:MAX_SERVERS]), why, masks, now)

    def _key(self, request: RoutingRequest, known: int) -> bytes:
        """Return the key of the servers' order: the session, else the first unknown block, else a counter."""
        if request.session is not None:
            return b"session " + request.session.encode()
        if known < len(request.chain):
            return request.chain[known]
        return next(self._unknown).to_bytes(8, "little")

    def _with_room(self, order: Rendezvous, key: bytes, balance: float, now: float) -> list[str]:
        """Return some servers with room: within the balance in a key's order, then beyond it by load."""
        limit = max(FEW, math.ceil(balance * (self.sequences + 1) / max(1, self.num_ready)))
        within, beyond = list[str](), list[str]()
        for server in order.order(key):
            if self._has_room(server, now):
                (within if self._servers[server].load.sequences < limit else beyond).append(server)
                if len(within) == MAX_SERVERS or (within and len(beyond) > MAX_LOOKS):
                    break
        beyond.sort(key=lambda server: self._servers[server].load.sequences)
        return (within + beyond)[:MAX_SERVERS]

    def _none_has_room(
        self, request: RoutingRequest, order: Rendezvous, key: bytes, masks: list[int], now: float
    ) -> Pick | Refusal:
        """Handle a request while all servers are full or failing. If all are failing, they get the request anyway,
        because the fault may be in the gateway's network; in a careful pool, the request is refused instead."""
        failed = list[str]()
        for server in order.order(key):
            if self._servers[server].failed_until <= now:
                self._all_full = request.subset is None and not failed
                return Refusal("saturated", self._settings.retry_after_s)
            failed.append(server)
        if self.careful:
            return Refusal("none", self._settings.retry_after_s)
        return self._send(request, tuple(failed[:MAX_SERVERS]), "load", masks, now)

    def _send(
        self,
        request: RoutingRequest,
        servers: tuple[str, ...],
        why: Literal["held", "session", "prefix", "home", "load"],
        masks: list[int],
        now: float,
    ) -> Pick:
        """Count a request for the first of these servers, and return the pick."""
        server = servers[0]
        known = min(request.size, self._prefixes.cached_bytes(server, masks))
        to_compute = request.size - known
        self._usual += USUAL_GAIN * (to_compute - self._usual)
        number = self._last_number = max(self._last_number + 1, int(now * 1e6))
        self._servers[server].load.send(number, to_compute, now)
        self.sequences += 1
        self._index.remember(request.chain, server)
        return Pick(servers, why, known / request.size if request.size else 0.0, number)

    def _work(self, server: str) -> float:
        return self._servers[server].load.work(self._usual)
