"""Server-sent events: ``data: {json}`` for each event, and an API-specific end of the stream.

Status and headers are sent with the first event, so that a request that the engine refuses still gets an error status.
Later errors are sent as events. The stream then lacks its usual end, so that clients see that the answer is incomplete.

With the request header ``X-Stoker-Usage: 1`` the last event of each chunk carries the token counts so far, for streams
that break off: ``"stoker_usage": {"prompt_tokens", "completion_tokens", "cached_tokens"}``.
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

#: Request header that asks for usage in events.
USAGE_HEADER = "x-stoker-usage"


class Event(Protocol):
    """An event in an API's format; its `type` is its name if events are named."""

    def model_dump_json(self) -> str:
        """Return the event as JSON."""
        ...


@dataclass(frozen=True)
class Framing:
    """How an API frames its events.

    Attributes:
        named: whether each event has a line with its name, which is its `type`.
        last: bytes after the last event of a complete answer.
        error: encodes the event that ends a failed stream.
    """

    named: bool
    last: bytes
    error: Callable[[Exception], bytes]


class EventStream(Response):
    """Sends `events` as they arrive, each list in one chunk; closes `events` when the client disconnects.

    Args:
        usage: returns the token counts so far, over all choices.
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
        del self.headers["content-length"]  # unknown for a stream
        self._events = events
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
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
                    if tells_usage:  # once per chunk
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
        """Return the end of an event's JSON: the field `stoker_usage` and the closing brace."""
        usage = self._usage()
        cached = b"" if usage.cached_tokens is None else b',"cached_tokens":%d' % usage.cached_tokens
        counts = usage.prompt_tokens, usage.completion_tokens, cached
        return b',"stoker_usage":{"prompt_tokens":%d,"completion_tokens":%d%b}}' % counts


def event(data: bytes, name: str = "") -> bytes:
    """Return an encoded event, with a line for its name if `name` is not empty."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
