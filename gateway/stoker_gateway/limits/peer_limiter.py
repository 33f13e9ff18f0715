"""Limiter that shares the limits of keys with other replicas of the gateway.

A key's owner decides from the usage that it knows, without that of unreachable replicas. Other replicas send the owner
admission requests, together with their clients' usage of the key. A replica that gets no verdict in time decides from
its own clients' usage and its own share of the limits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from stoker_gateway.keys.key import Key, Limits
from stoker_gateway.limits.ledger import Ledger
from stoker_gateway.limits.limiter import grant_ids
from stoker_gateway.limits.messages import LimitRequest, LimitVerdict, Message, Reply
from stoker_gateway.limits.peer_client import Peer
from stoker_gateway.limits.peer_reports import PeerReports, statement
from stoker_gateway.limits.rate_limit import LimitShare, decide
from stoker_gateway.limits.ratelimit_headers import Denial, Grant, RateLimitStatus
from stoker_gateway.limits.replicas import View

logger = logging.getLogger(__name__)

#: Maximum time to wait for the owner's verdict, in seconds.
MAX_VERDICT_WAIT_S: Final = 0.1
#: Seconds without a message from another replica after which it counts as unreachable.
SILENT_S: Final = 2.0
#: Maximum number of tokens that a request reserves. It exceeds each limit of a key.
_MAX_TOKENS: Final = 2**40
#: Interval in seconds at which the usage of all keys is reported again.
_RESTATE_S: Final = 10.0


class PeerLimiter:
    """A `Limiter` that shares limits with other replicas. Runs in one event loop.

    Args:
        token: shared secret of all replicas.
        clock: monotonic clock in seconds, the same as for the times passed to `reserve` and `settle`.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = token
        self._clock = clock
        self._ids = grant_ids()
        #: Identity of this replica, new at each start.
        self.identity = next(self._ids)
        self._ledger = Ledger(self._report_usage)
        self._reports = PeerReports()
        self._peers: dict[str, Peer] = {}
        self._last_messages: dict[str, tuple[int, float]] = {}  # identity → number and arrival time of its last message
        self._number = 0
        self._restated_at = 0.0
        #: This replica's view of the replicas that it knows and reaches.
        self.view = View(self.identity)

    async def set_peers(self, addresses: Iterable[str]) -> None:
        """Set the replicas' addresses, ``HOST:PORT``, with or without this replica's own."""
        current = set(addresses)
        departed = [self._peers.pop(address) for address in self._peers.keys() - current]
        for address in sorted(current - self._peers.keys()):
            self._peers[address] = Peer(address, self._token, self._message, self._update_view)
        self._update_view()
        await asyncio.gather(*(peer.close() for peer in departed))

    async def close(self) -> None:
        """Close the connections to the other replicas."""
        await self.set_peers(())

    async def reserve(self, key: Key, tokens: int, now: float) -> Grant | Denial:
        """See `Limiter`."""
        tokens = min(max(0, tokens), _MAX_TOKENS)
        request, peer = LimitRequest(key.id, key.limits, tokens), self._peer(self.view.owner(key.id))
        if peer is None or key.limits == Limits():
            grant = self._begin(request, self._decide(request, self.identity, now))
            self._report_usage(key.id)
            return grant
        if not peer.is_unresponsive and (answer := await self._request(peer, request)) is not None:
            return answer
        now = self._clock()
        uses = [self._ledger.use(key.id, now)]
        return self._begin(request, decide(key.limits, uses, tokens, now, self.view.share_alone))

    def settle(self, grant_id: str, tokens: int | None, now: float) -> None:
        """See `Limiter`."""
        self._ledger.end(grant_id, tokens, now)

    def receive(self, message: Message) -> Reply:
        """Process a replica's message, and return the reply."""
        now, sender = self._clock(), message.sender
        if sender != self.identity:
            if message.number <= self._last_messages.get(sender, (-1, 0.0))[0]:
                # Outdated: the sender has sent a later message, and does not wait for this reply.
                return Reply(self.identity)
            for key_id, report in message.uses.items():
                self._reports.record(sender, key_id, report, now)
            self._last_messages[sender] = message.number, now
            self._update_view()
        verdicts = []
        for request in message.requests:
            verdict = self._decide(request, sender, now)
            if isinstance(verdict, RateLimitStatus):
                self._reports.begin(sender, request.key_id, request.tokens, now)
            verdicts.append(verdict)
        return Reply(self.identity, tuple(verdicts))

    def _decide(self, request: LimitRequest, sender: str, now: float) -> LimitVerdict:
        """Decide as the key's owner."""
        # Unreachable replicas enforce their own share, so their usage is left out.
        unreachable = {each.identity for each in self._peers.values() if each.identity} - self.view.reached - {sender}
        uses = [self._ledger.use(request.key_id, now), *self._reports.uses(request.key_id, now, unreachable)]
        share = LimitShare() if request.limits == Limits() else self.view.share
        return decide(request.limits, uses, request.tokens, now, share)

    def _begin(self, request: LimitRequest, verdict: LimitVerdict) -> Grant | Denial:
        if isinstance(verdict, Denial):
            return verdict
        grant = Grant(next(self._ids), verdict)
        self._ledger.begin(grant.id, request.key_id, request.tokens, self._clock())
        return grant

    async def _request(self, peer: Peer, request: LimitRequest) -> Grant | Denial | None:
        """Request admission from another replica; return None if there is no verdict in time."""
        answer = peer.request(request, lambda verdict: self._begin(request, verdict))
        try:
            await asyncio.wait({answer}, timeout=MAX_VERDICT_WAIT_S)
        except asyncio.CancelledError:
            if answer.done() and isinstance(grant := answer.result(), Grant):
                self.settle(grant.id, 0, self._clock())
            raise
        finally:
            # The owner may count this request as admitted; the next usage statement corrects that.
            if answer.cancel():
                peer.report_usage(request.key_id, soon=True)
        if answer.cancelled():
            peer.is_unresponsive = True
            return None
        return answer.result()

    def _peer(self, identity: str) -> Peer | None:
        """Return the connection to a replica; None for this replica and unknown ones."""
        if identity == self.identity:
            return None
        return next((peer for peer in self._peers.values() if peer.identity == identity), None)

    def _report_usage(self, key_id: str) -> None:
        """Queue a statement of a key's usage for its owner or, if this replica is the owner, for the owner's
        successor."""
        for identity in self.view.order(key_id):
            if (peer := self._peer(identity)) is not None:
                peer.report_usage(key_id, soon=identity == self.view.owner(key_id))
                return

    def _message(self, key_ids: Iterable[str], requests: tuple[LimitRequest, ...]) -> Message:
        now = self._clock()
        self._number += 1
        uses = {key_id: statement(self._ledger.use(key_id, now), now) for key_id in key_ids}
        return Message(self.identity, self._number, uses, requests)

    def _update_view(self) -> None:
        """Update the view of the replicas. Report all keys' usage if the view has changed, and every `_RESTATE_S`."""
        now = self._clock()
        self._last_messages = {each: last for each, last in self._last_messages.items() if now - last[1] < SILENT_S}
        peers = {peer.identity or peer.address: peer for peer in self._peers.values()}
        peers.pop(self.identity, None)
        reached = frozenset(each for each, peer in peers.items() if peer.reached and each in self._last_messages)
        changed = (reached, len(peers) + 1) != (self.view.reached, self.view.number)
        if changed:
            self.view = View(self.identity, reached, len(peers) + 1)
            share = self.view.share
            logger.info("%d of %d replicas reach each other and share the keys' limits", share.parts, share.of)
        if changed or now - self._restated_at > _RESTATE_S:
            self._restated_at = now
            for key_id in self._ledger:
                self._report_usage(key_id)
