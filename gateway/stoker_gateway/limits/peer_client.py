"""Another replica, as this one speaks to it: one message at a time, with all that has come together meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc

from stoker_gateway.limits.messages import LimitRequest, LimitVerdict, Message, MessageError, Reply
from stoker_gateway.limits.peer_server import METHOD, SERVICE, credentials
from stoker_gateway.limits.ratelimit_headers import Denial, Grant

logger = logging.getLogger(__name__)

#: Seconds between messages where there is nothing to say.
HEARTBEAT_S: Final = 0.5
#: For how long a message may be under way until its receiver counts as not reached.
_LOST_S: Final = 1.0
#: For how long the news that a request has ended may wait for company.
_REPORT_DELAY_S: Final = 0.1
#: Keys in a message, at most.
_MAX_KEYS: Final = 500


class Peer:
    """Another replica.

    Args:
        address: ``HOST:PORT``.
        token: that all replicas know.
        message: makes a message about the use of these keys, with these asks.
        changed: told when it is reached, or not any more.
    """

    def __init__(
        self,
        address: str,
        token: str,
        message: Callable[[Iterable[str], tuple[LimitRequest, ...]], Message],
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        #: Who it is, once known.
        self.identity: str | None = None
        #: Whether it answered last.
        self.reached = False
        #: Whether it has left an ask unanswered for too long, and said nothing since.
        self.needs_relist = False
        self._missed = False
        self._message = message
        self._changed = changed
        self._asks: list[_PendingRequest] = []
        self._changed_keys: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._call = self._channel.unary_unary(f"/{SERVICE}/{METHOD}")
        self._metadata = (("authorization", credentials(token)),)
        self._task = asyncio.create_task(self._speak())

    def ask(
        self, ask: LimitRequest, take: Callable[[LimitVerdict], Grant | Denial]
    ) -> asyncio.Future[Grant | Denial | None]:
        """Asks.

        Args:
            take: takes the verdict in, before anything else is said, unless the future is cancelled.

        Returns:
            what that returns; None where the replica is not reached.
        """
        pending = _PendingRequest(ask, take)
        self._asks.append(pending)
        self._wake.set()
        return pending.answer

    def tell(self, key_id: str, *, soon: bool) -> None:
        """There is news of a key's use.

        Args:
            soon: whether it goes by itself; else it waits for the next message.
        """
        self._changed_keys[key_id] = None
        if soon and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REPORT_DELAY_S, self._wake.set)

    async def close(self) -> None:
        """Ends."""
        self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for pending in self._asks:
            pending.end(None)
        await self._channel.close()

    async def _speak(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), HEARTBEAT_S)
            self._wake.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            waiting = [each for each in self._asks if not each.answer.done()]
            asks, self._asks = waiting[:_MAX_KEYS], waiting[_MAX_KEYS:]
            key_ids = list(self._changed_keys)[:_MAX_KEYS]
            for key_id in key_ids:
                del self._changed_keys[key_id]
            if self._changed_keys or self._asks:
                self._wake.set()
            verdicts: tuple[LimitVerdict | None, ...] = (None,) * len(asks)
            try:
                reply = await self._exchange(key_ids, tuple(each.ask for each in asks))
                verdicts = verdicts if reply is None else reply.verdicts
            finally:
                for pending, verdict in zip(asks, verdicts, strict=True):
                    pending.end(verdict)

    async def _exchange(self, key_ids: list[str], asks: tuple[LimitRequest, ...]) -> Reply | None:
        all_key_ids = dict.fromkeys([*key_ids, *(ask.key_id for ask in asks)])
        message = self._message(all_key_ids, asks)
        try:
            reply = Reply.decode(await self._call(message.encode(), timeout=_LOST_S, metadata=self._metadata))
            if len(reply.verdicts) != len(asks):
                raise MessageError(f"{len(reply.verdicts)} verdicts for {len(asks)} requests")
        except Exception as error:  # whatever it is, this replica goes on, and tries again
            self._lost(error)
            self._changed_keys |= all_key_ids
            return None
        self.needs_relist = False
        self.reached, self.identity = True, reply.sender
        self._changed()
        return reply

    def _lost(self, error: Exception) -> None:
        if self.reached or not self._missed:
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            logger.warning(
                "cannot reach the replica at %s: %s; each side enforces its share of the keys' limits",
                self.address,
                why,
            )
        self.reached, self._missed = False, True
        self._changed()


#: Replicas are near: who is gone is looked for often.
_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]


class _PendingRequest:
    """An ask that waits for its answer."""

    def __init__(self, ask: LimitRequest, take: Callable[[LimitVerdict], Grant | Denial]) -> None:
        self.ask = ask
        self._take = take
        self.answer: asyncio.Future[Grant | Denial | None] = asyncio.get_running_loop().create_future()

    def end(self, verdict: LimitVerdict | None) -> None:
        """Says what came of it, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_result(None if verdict is None else self._take(verdict))
