"""Client of another replica. It sends one message at a time, with queued usage reports and admission requests."""

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

#: Time after which a message is sent even if nothing is queued, in seconds.
HEARTBEAT_S: Final = 0.5
#: Timeout of a message, in seconds.
_LOST_S: Final = 1.0
#: Delay of urgent usage reports, for batching, in seconds.
_REPORT_DELAY_S: Final = 0.1
#: Maximum number of queued usage reports, and of admission requests, in a message.
_MAX_KEYS: Final = 500


class Peer:
    """Connection to another replica.

    Args:
        address: ``HOST:PORT``.
        token: shared secret of all replicas.
        message: returns a message with the usage of the given keys, and with the given admission requests.
        changed: called after each exchange, successful or not.
    """

    def __init__(
        self,
        address: str,
        token: str,
        message: Callable[[Iterable[str], tuple[LimitRequest, ...]], Message],
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        #: Identity in the replica's last reply; None before the first.
        self.identity: str | None = None
        #: Whether the last message got a valid reply.
        self.reached = False
        #: Whether an admission request has timed out since the last valid reply.
        self.is_unresponsive = False
        self._missed = False
        self._message = message
        self._changed = changed
        self._pending: list[_PendingRequest] = []
        self._changed_keys: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._call = self._channel.unary_unary(f"/{SERVICE}/{METHOD}")
        self._metadata = (("authorization", credentials(token)),)
        self._task = asyncio.create_task(self._send_messages())

    def request(
        self, request: LimitRequest, on_verdict: Callable[[LimitVerdict], Grant | Denial]
    ) -> asyncio.Future[Grant | Denial | None]:
        """Queue an admission request.

        Args:
            on_verdict: called with the verdict, if there is one, before the next message is sent, unless the future is
                cancelled.

        Returns:
            A future of `on_verdict`'s result, or of None if there is no verdict.
        """
        pending = _PendingRequest(request, on_verdict)
        self._pending.append(pending)
        self._wake.set()
        return pending.answer

    def report_usage(self, key_id: str, *, soon: bool) -> None:
        """Queue a statement of a key's usage.

        Args:
            soon: whether a message is sent after `_REPORT_DELAY_S` at the latest, rather than after `HEARTBEAT_S`.
        """
        self._changed_keys[key_id] = None
        if soon and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REPORT_DELAY_S, self._wake.set)

    async def close(self) -> None:
        """Close the connection; pending admission requests get the result None."""
        self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for pending in self._pending:
            pending.end(None)
        await self._channel.close()

    async def _send_messages(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), HEARTBEAT_S)
            self._wake.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            waiting = [each for each in self._pending if not each.answer.done()]
            requests, self._pending = waiting[:_MAX_KEYS], waiting[_MAX_KEYS:]
            key_ids = list(self._changed_keys)[:_MAX_KEYS]
            for key_id in key_ids:
                del self._changed_keys[key_id]
            if self._changed_keys or self._pending:
                self._wake.set()
            verdicts: tuple[LimitVerdict | None, ...] = (None,) * len(requests)
            try:
                reply = await self._exchange(key_ids, tuple(each.request for each in requests))
                verdicts = verdicts if reply is None else reply.verdicts
            finally:
                for pending, verdict in zip(requests, verdicts, strict=True):
                    pending.end(verdict)

    async def _exchange(self, key_ids: list[str], requests: tuple[LimitRequest, ...]) -> Reply | None:
        all_key_ids = dict.fromkeys([*key_ids, *(request.key_id for request in requests)])
        message = self._message(all_key_ids, requests)
        try:
            reply = Reply.decode(await self._call(message.encode(), timeout=_LOST_S, metadata=self._metadata))
            if len(reply.verdicts) != len(requests):
                raise MessageError(f"{len(reply.verdicts)} verdicts for {len(requests)} requests")
        except Exception as error:  # the next message tries again after any error
            self._lost(error)
            self._changed_keys |= all_key_ids
            return None
        self.is_unresponsive = False
        self.reached, self.identity = True, reply.sender
        self._changed()
        return reply

    def _lost(self, error: Exception) -> None:
        if self.reached or not self._missed:
            why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            logger.warning(
                "no valid reply from the replica at %s: %s; each side enforces its share of the keys' limits",
                self.address,
                why,
            )
        self.reached, self._missed = False, True
        self._changed()


#: Reconnect quickly, because replicas are in the same cluster.
_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]


class _PendingRequest:
    """An admission request that waits for its verdict."""

    def __init__(self, request: LimitRequest, on_verdict: Callable[[LimitVerdict], Grant | Denial]) -> None:
        self.request = request
        self._on_verdict = on_verdict
        self.answer: asyncio.Future[Grant | Denial | None] = asyncio.get_running_loop().create_future()

    def end(self, verdict: LimitVerdict | None) -> None:
        """Set the result, unless the future is already done."""
        if not self.answer.done():
            self.answer.set_result(None if verdict is None else self._on_verdict(verdict))
