"""Which of an endpoint's servers gets a request: where most of its prompt is, unless that is more loaded than it saves.

In this order:

- The server that holds the response it goes on from: no other can.
- Its session's: the first in the session's order (`rendezvous.py`) that has room.
- Of those that were given the beginning of its prompt (`prefix_scorer.py`), and its *home*, the one with the least work
  before its first token, its own prompt included (`load.py`).

A conversation that is not known yet has a home: the first in the order of its first unknown block that is loaded at
most `BALANCE` times the mean (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016).
Two pickers find the same home, so they agree about a conversation of which each sees every other turn. A beginning that
conversations share does not draw them all to where it is: it is brought to their homes, a long one rarely at first and
the oftener the more servers have it, so that a new conversation costs some `HOME_BYTES` for each of those on average.

Which servers are ready, full or failing is known from what they report and what becomes of requests (`server_pool.py`);
nothing here has a clock or does any I/O.
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

#: How much more than the mean a server may have when a conversation, or a session, is brought to it.
BALANCE: Final = 1.25
SESSION_BALANCE: Final = 2.0

#: Up to so many requests a server is not loaded, whatever the mean is.
FEW: Final = 8

#: How many servers a pick names: the first, and those for the retry.
MAX_SERVERS: Final = 3

#: How many servers of an order that are loaded too much are looked at, where another is not.
MAX_LOOKS: Final = 32

#: How much a request moves the mean of what is usual.
USUAL_GAIN: Final = 0.05


@dataclass(frozen=True)
class PickerSettings:
    """How an endpoint's servers are picked.

    Attributes:
        max_blocks: blocks of prompts that are remembered.
        max_waiting: a server where requests wait is full with so many.
        retry_after_s: seconds after which a refused request should be sent again.
    """

    max_blocks: int = 500_000
    max_waiting: float = 64
    retry_after_s: float = 1.0


@dataclass(frozen=True)
class Pick:
    """Where a request goes.

    Attributes:
        servers: the best first; the others, if any, are for a retry.
        why: ``held``, ``session``, ``prefix``, ``home`` or ``load``.
        cached_share: part of its prompt that the first server was given before, as far as is known.
        number: tells it from others of its picker: when it was made, in microseconds, or a little later.
        held_s: for how many seconds its request was held before; None: it was not.
    """

    servers: tuple[str, ...]
    why: Literal["held", "session", "prefix", "home", "load"]
    cached_share: float
    number: int = 0
    held_s: float | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a request goes nowhere.

    Attributes:
        kind: ``none``: no server may get it; ``saturated``: all that may are full; ``not held``: too much is held;
            ``held``: it was held for as long as it may be; ``not started``: the endpoint's servers do not start.
        retry_after_s: seconds after which it should be sent again.
        held_s: for how many seconds it was held; None: it was not.
    """

    kind: Literal["none", "saturated", "not held", "held", "not started"]
    retry_after_s: float
    held_s: float | None = None


class EndpointPicker(ServerPool):
    """Picks among the servers of one endpoint, and counts what it sent them. Used by one thread.

    Args:
        settings: how.
        identity: what tells this picker from others of the same endpoint: where nothing is known of a request, they
            begin at different places of the order of servers.
    """

    def __init__(self, settings: PickerSettings | None = None, identity: str = "") -> None:
        self._settings = settings or PickerSettings()
        super().__init__(self._settings.max_blocks, self._settings.max_waiting)
        self._prefixes = PrefixScorer(self._index)
        self._usual = 1024.0  # bytes of a prompt that are to be computed, a moving mean
        self._last_number = 0
        start = blake2b(identity.encode(), digest_size=7).digest()  # a byte of the key's eight is left to count on
        self._unknown = count(int.from_bytes(start, "little"))

    def pick(self, ask: RoutingRequest, now: float) -> Pick | Refusal:
        """Chooses servers for a request, and counts it for the first of them."""
        order, mask = self._ready, self._ready_mask
        if ask.subset is not None:
            allowed = [name for name in ask.subset if name in self._servers and self._servers[name].load.reported.ready]
            order, mask = Rendezvous(allowed), self._index.mask(allowed)
        if not mask:
            return Refusal("none", self._settings.retry_after_s)
        masks = self._prefixes.match(ask.chain, mask)
        held_by = ask.held_by
        if held_by is not None and held_by in self._servers and self._index.bit(held_by) & mask:
            if self._is_full(held_by):
                return Refusal("saturated", self._settings.retry_after_s)
            return self._send(ask, (held_by,), "held", masks, now)
        if ask.subset is None and self._all_full:
            return Refusal("saturated", self._settings.retry_after_s)

        key, balance = self._key(ask, len(masks)), SESSION_BALANCE if ask.session is not None else BALANCE
        candidates = self._with_room(order, key, balance, now)
        holders = (
            self._prefixes.holders(key, masks, lambda server: self._has_room(server, now))
            if ask.session is None
            else []
        )
        if not candidates and not holders:
            return self._none_has_room(ask, order, key, masks, now)
        if ask.session is not None:
            return self._send(ask, tuple(candidates), "session", masks, now)
        if not ask.chain:
            candidates.sort(key=self._work)
            return self._send(ask, tuple(candidates), "load", masks, now)
        if not masks:
            return self._send(ask, tuple(candidates), "home", masks, now)

        scorer = self._prefixes
        home = candidates[0] if candidates and scorer.is_new(ask.chain, masks) else None
        comes_home = scorer.comes_home(key, masks)

        def cost(server: str) -> tuple[bool, float]:
            return not (comes_home and server == home), self._work(server) - scorer.cached_bytes(server, masks)

        best = sorted(dict.fromkeys(holders + candidates), key=cost)
        first = best[0]
        why: Literal["prefix", "home", "load"] = (
            "home" if first == home else "prefix" if scorer.cached_bytes(first, masks) else "load"
        )
        return self._send(ask, tuple(best[:MAX_SERVERS]), why, masks, now)

    def _key(self, ask: RoutingRequest, known: int) -> bytes:
        """What decides the order of servers: the session, the first unknown block, or else nothing that lasts."""
        if ask.session is not None:
            return b"session " + ask.session.encode()
        if known < len(ask.chain):
            return ask.chain[known]
        return next(self._unknown).to_bytes(8, "little")

    def _with_room(self, order: Rendezvous, key: bytes, balance: float, now: float) -> list[str]:
        """The first servers of a key's order that may get a request: those within the balance before those beyond."""
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
        self, ask: RoutingRequest, order: Rendezvous, key: bytes, masks: list[int], now: float
    ) -> Pick | Refusal:
        """All are full or have failed. If all have failed, they are tried nevertheless: it may be us who failed. A
        careful pool waits instead until one of them reports."""
        failed = list[str]()
        for server in order.order(key):
            if self._servers[server].failed_until <= now:
                self._all_full = ask.subset is None and not failed
                return Refusal("saturated", self._settings.retry_after_s)
            failed.append(server)
        if self.careful:
            return Refusal("none", self._settings.retry_after_s)
        return self._send(ask, tuple(failed[:MAX_SERVERS]), "load", masks, now)

    def _send(
        self,
        ask: RoutingRequest,
        servers: tuple[str, ...],
        why: Literal["held", "session", "prefix", "home", "load"],
        masks: list[int],
        now: float,
    ) -> Pick:
        """Counts a request for the first of these servers."""
        server = servers[0]
        known = min(ask.size, self._prefixes.cached_bytes(server, masks))
        to_compute = ask.size - known
        self._usual += USUAL_GAIN * (to_compute - self._usual)
        number = self._last_number = max(self._last_number + 1, int(now * 1e6))
        self._servers[server].load.send(number, to_compute, now)
        self.sequences += 1
        self._index.remember(ask.chain, server)
        return Pick(servers, why, known / ask.size if ask.size else 0.0, number)

    def _work(self, server: str) -> float:
        return self._servers[server].load.work(self._usual)
