"""Server-sent events: ``data: {json}`` for each event, and what an API ends its streams with.

The status and the headers wait for the first event, so that a request the engine refuses still gets its 400.
After that an error can only be sent as an event; the stream then lacks its usual end, so that no client takes it for a
complete answer.

Whoever asks with the header ``X-Stoker-Usage: 1`` is told in the events what was counted so far, by a field of its own,
so that a stream that breaks off has its count: ``"stoker_usage": {"prompt_tokens", "completion_tokens",
"cached_tokens"}``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker_engine.server.connection.disconnect import ClientGoneError, until_disconnect
from stoker_engine.server.conversation.usage import Usage
from stoker_engine.server.errors.description import log_unexpected

#: The request header that asks for usage in events.
USAGE_HEADER = "x-stoker-usage"


class Event(Protocol):
    """An event, as an API writes it; where events are named, its `type` is its name."""

    def model_dump_json(self) -> str:
        """It as JSON."""
        ...


@dataclass(frozen=True)
class Framing:
    """How an API writes its events.

    Attributes:
        named: whether each event has a line with its name, which is its `type`.
        last: what comes after the last event of a whole answer.
        error: writes the event that ends a stream that fails.
    """

    named: bool
    last: bytes
    error: Callable[[Exception], bytes]


class EventStream(Response):
    """Sends `events` as they come, those that come together in one piece; closes them when the client hangs up.

    Args:
        usage: the tokens so far, over all choices.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Sequence[Event], None],
        headers: Mapping[str, str],
        usage: Callable[[], Usage],
        framing: Framing,
    ) -> None:
        self._framing = framing
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]  # it grows while it is sent
        self._events = events
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request."""
        try:
            tells_usage = Headers(scope=scope).get(USAGE_HEADER) == "1"
            await until_disconnect(receive, self._send_all(send, tells_usage=tells_usage))
        except ClientGoneError:
            return

    async def _send_all(self, send: Send, *, tells_usage: bool) -> None:
        started = False
        end = self._framing.last
        try:
            async with aclosing(self._events) as events:
                async for some in events:
                    if not some:
                        continue
                    if not started:
                        started = True
                        await send(
                            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                        )
                    data = [each.model_dump_json().encode() for each in some]
                    if tells_usage:  # once for those that come together
                        data[-1] = data[-1][:-1] + self._counted()
                    framed = map(self._framed, some, data)
                    await _send_body(send, b"".join(framed), more=True)
        except Exception as error:
            if not started:
                raise
            log_unexpected(error)
            end = self._framing.error(error)
        await _send_body(send, end, more=False)

    def _framed(self, each: Event, data: bytes) -> bytes:
        return event(data, each.type if self._framing.named else "")  # type: ignore[attr-defined]

    def _counted(self) -> bytes:
        """The end of an event that tells the usage."""
        usage = self._usage()
        cached = b"" if usage.cached_tokens is None else b',"cached_tokens":%d' % usage.cached_tokens
        counts = usage.prompt_tokens, usage.completion_tokens, cached
        return b',"stoker_usage":{"prompt_tokens":%d,"completion_tokens":%d%b}}' % counts


def event(data: bytes, name: str = "") -> bytes:
    """One event; `name` is its type, where it has a line of its own."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
