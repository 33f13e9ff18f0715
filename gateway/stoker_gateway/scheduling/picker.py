"""Which of an endpoint's servers gets a request: where most of its prompt is, unless that is more loaded than it saves.

In this order:

- The server that holds the response it goes on from: no other can.
- Its session's: the first in the session's order (`rendezvous.py`) that has room.
- Of those that were given the beginning of its prompt, and its *home*, the one with the least work before its first
  token, its own prompt included (`load.py`).

A conversation that is not known yet has a home: the first in the order of its first unknown block that is loaded at
most `BALANCE` times the mean (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016).
Two pickers find the same home, so they agree about a conversation of which each sees every other turn. A beginning that
conversations share does not draw them all to where it is: it is brought to their homes, a long one rarely at first and
the oftener the more servers have it, so that a new conversation costs some `HOME_BYTES` for each of those on average.

What is ready, full or failing is known from `observe`, `ended` and `failed`; nothing here has a clock or does any I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Final, Literal

from stoker_common.text_prefix_hash import block_ends
from stoker_gateway.scheduling.load import Load, ServerLoad
from stoker_gateway.scheduling.prefix_index import FOLLOWED, PrefixIndex
from stoker_gateway.scheduling.rendezvous import Rendezvous
from stoker_gateway.scheduling.routing_request import RoutingRequest

#: How much more than the mean a server may have when a conversation, or a session, is brought to it.
BALANCE: Final = 1.25
SESSION_BALANCE: Final = 2.0

#: Up to so many requests a server is not loaded, whatever the mean is.
FEW: Final = 8

#: Bytes of a shared beginning that are computed again, on average, to bring a conversation home: some 1,024 tokens.
HOME_BYTES: Final = 4096

#: How many servers that were given a prompt's beginning are weighed.
MAX_HOLDERS: Final = 8

#: How many servers a pick names: the first, and those for the retry.
MAX_SERVERS: Final = 3

#: How many servers of an order that are loaded too much are looked at, where another is not.
MAX_LOOKS: Final = 32

#: How much a request moves the mean of what is usual.
USUAL_GAIN: Final = 0.05

#: For how many seconds a server that failed gets nothing while others do; doubled with each failure, up to the longest.
FAILED_S: Final = 1.0
LONGEST_FAILED_S: Final = 30.0

#: Bytes of a prompt up to the end of each block; a chain is shorter.
_ENDS: Final = tuple(block_ends(1 << 40))


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
    """

    servers: tuple[str, ...]
    why: Literal["held", "session", "prefix", "home", "load"]
    cached_share: float
    number: int = 0


@dataclass(frozen=True)
class Refusal:
    """Why a request goes nowhere.

    Attributes:
        kind: ``none``: no server may get it; ``saturated``: all that may are full.
        retry_after_s: seconds after which it should be sent again.
    """

    kind: Literal["none", "saturated"]
    retry_after_s: float


@dataclass
class _Server:
    """What is known of a server.

    Attributes:
        asked_at: when it was asked what it last said.
        failures: since it last said that it is ready.
        failed_at, failed_until: the last of them, and until when it gets nothing.
    """

    load: Load = field(default_factory=Load)
    asked_at: float = -math.inf
    failures: int = 0
    failed_at: float = -math.inf
    failed_until: float = -math.inf


class EndpointPicker:
    """Picks among the servers of one endpoint, and counts what it sent them. Used by one thread.

    Args:
        settings: how.
        identity: what tells this picker from others of the same endpoint: where nothing is known of a request, they
            begin at different places of the order of servers.
    """

    def __init__(self, settings: PickerSettings | None = None, identity: str = "") -> None:
        self._settings = settings or PickerSettings()
        self._servers: dict[str, _Server] = {}
        self._index = PrefixIndex(self._settings.max_blocks)
        self._ready = Rendezvous(())
        self._ready_mask = 0
        self._sequences = 0.0  # of all ready servers
        self._num_ready = 0
        self._usual = 1024.0  # bytes of a prompt that are to be computed, a moving mean
        self._all_full = False  # when last looked at, and nothing was heard since
        self._last_number = 0
        start = blake2b(identity.encode(), digest_size=7).digest()  # a byte of the key's eight is left to count on
        self._unknown = count(int.from_bytes(start, "little"))

    @property
    def num_ready(self) -> int:
        """How many servers are ready."""
        return self._num_ready

    @property
    def num_blocks(self) -> int:
        """Blocks of prompts that are remembered."""
        return len(self._index)

    @property
    def sequences(self) -> float:
        """Requests at all servers that are ready, as far as is known."""
        return self._sequences

    def set_servers(self, addresses: Iterable[str], now: float) -> None:
        """These are all servers there are. New ones count as ready and idle until they say otherwise."""
        current = dict.fromkeys(addresses)
        for departed in [server for server in self._servers if server not in current]:
            del self._servers[departed]
            self._index.remove_server(departed)
        for server in current:
            if server not in self._servers:
                self._servers[server] = _Server()
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
        if load.ready != was_ready:
            self._count_ready()
        elif was_ready:
            self._sequences += known.load.sequences - before

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
                self._sequences += known.load.sequences - before

    def failed(self, server: str, now: float) -> None:
        """A server did not answer: it gets nothing for a while, unless all have failed. Unknown ones are ignored, and
        what it has said something since."""
        known = self._servers.get(server)
        if known is not None and now >= known.asked_at:
            known.failed_at = now
            known.failed_until = now + min(LONGEST_FAILED_S, FAILED_S * 2 ** min(known.failures, 10))
            known.failures += 1

    def pick(self, ask: RoutingRequest, now: float) -> Pick | Refusal:
        """Chooses servers for a request, and counts it for the first of them."""
        order, mask = self._ready, self._ready_mask
        if ask.subset is not None:
            allowed = [name for name in ask.subset if name in self._servers and self._servers[name].load.reported.ready]
            order, mask = Rendezvous(allowed), self._index.mask(allowed)
        if not mask:
            return Refusal("none", self._settings.retry_after_s)
        masks = [each & (mask | FOLLOWED) for each in self._index.find(ask.chain)]
        while masks and masks[-1] <= FOLLOWED:
            masks.pop()  # whoever was given this has gone
        held_by = ask.held_by
        if held_by is not None and held_by in self._servers and self._index.bit(held_by) & mask:
            if self._is_full(held_by):
                return Refusal("saturated", self._settings.retry_after_s)
            return self._send(ask, (held_by,), "held", masks, now)
        if ask.subset is None and self._all_full:
            return Refusal("saturated", self._settings.retry_after_s)

        key, balance = self._key(ask, len(masks)), SESSION_BALANCE if ask.session is not None else BALANCE
        candidates = self._with_room(order, key, balance, now)
        holders = self._holders(key, masks, now) if ask.session is None else []
        if not candidates and not holders:
            return self._none_has_room(ask, order, key, masks, now)
        if ask.session is not None:
            return self._send(ask, tuple(candidates), "session", masks, now)
        if not ask.chain:
            candidates.sort(key=self._work)
            return self._send(ask, tuple(candidates), "load", masks, now)
        if not masks:
            return self._send(ask, tuple(candidates), "home", masks, now)

        is_new = len(masks) < len(ask.chain) and bool(masks[-1] & FOLLOWED)
        home = candidates[0] if is_new and candidates else None
        draw = int.from_bytes(key[:4], "little") / 2**32
        comes_home = draw * _ENDS[len(masks) - 1] < HOME_BYTES * (masks[-1] & mask).bit_count()

        def cost(server: str) -> tuple[bool, float]:
            return not (comes_home and server == home), self._work(server) - self._known(server, masks)

        best = sorted(dict.fromkeys(holders + candidates), key=cost)
        first = best[0]
        why: Literal["prefix", "home", "load"] = (
            "home" if first == home else "prefix" if self._known(first, masks) else "load"
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
        limit = max(FEW, math.ceil(balance * (self._sequences + 1) / max(1, self._num_ready)))
        within, beyond = list[str](), list[str]()
        for server in order.order(key):
            if self._gets_requests(server, now) and not self._is_full(server):
                (within if self._servers[server].load.sequences < limit else beyond).append(server)
                if len(within) == MAX_SERVERS or (within and len(beyond) > MAX_LOOKS):
                    break
        beyond.sort(key=lambda server: self._servers[server].load.sequences)
        return (within + beyond)[:MAX_SERVERS]

    def _holders(self, key: bytes, masks: list[int], now: float) -> list[str]:
        """Servers that were given the most of a prompt and may get a request, the longest beginning first."""
        holders, weighed = list[str](), FOLLOWED
        for number in range(len(masks) - 1, -1, -1):
            new_holders = masks[number] & ~weighed
            if not new_holders:
                continue
            weighed |= new_holders
            start = int.from_bytes(key[:4], "little")
            for server in self._index.names(new_holders, MAX_HOLDERS - len(holders), start):
                if self._gets_requests(server, now) and not self._is_full(server):
                    holders.append(server)
            if len(holders) >= MAX_HOLDERS:
                break
        return holders

    def _none_has_room(
        self, ask: RoutingRequest, order: Rendezvous, key: bytes, masks: list[int], now: float
    ) -> Pick | Refusal:
        """All are full or have failed. If all have failed, they are tried nevertheless: it may be us who failed."""
        failed = list[str]()
        for server in order.order(key):
            if self._servers[server].failed_until <= now:
                self._all_full = ask.subset is None and not failed
                return Refusal("saturated", self._settings.retry_after_s)
            failed.append(server)
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
        known = min(ask.size, self._known(server, masks))
        to_compute = ask.size - known
        self._usual += USUAL_GAIN * (to_compute - self._usual)
        number = self._last_number = max(self._last_number + 1, int(now * 1e6))
        self._servers[server].load.send(number, to_compute, now)
        self._sequences += 1
        self._index.remember(ask.chain, server)
        return Pick(servers, why, known / ask.size if ask.size else 0.0, number)

    def _known(self, server: str, masks: list[int]) -> int:
        """Bytes of a prompt's beginning that a server was given before."""
        bit = self._index.bit(server)
        for number in range(len(masks) - 1, -1, -1):
            if masks[number] & bit:
                return _ENDS[number]
        return 0

    def _gets_requests(self, server: str, now: float) -> bool:
        """Whether a ready server may get requests; brings what is known of it up to date."""
        known = self._servers[server]
        before = known.load.sequences
        known.load.pass_time(now)
        self._sequences += known.load.sequences - before
        return known.failed_until <= now

    def _is_full(self, server: str) -> bool:
        return self._servers[server].load.is_full(self._settings.max_waiting)

    def _work(self, server: str) -> float:
        return self._servers[server].load.work(self._usual)

    def _count_ready(self) -> None:
        """Servers have come or gone, or have started or ceased to be ready."""
        ready = {name: known.load for name, known in self._servers.items() if known.load.reported.ready}
        self._ready = Rendezvous(ready)
        self._ready_mask = self._index.mask(ready)
        self._sequences = sum(load.sequences for load in ready.values())
        self._num_ready = len(ready)
        self._all_full = False
