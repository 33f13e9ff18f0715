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

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker_engine.server.connection.body_writer import body_writer
from stoker_engine.server.connection.disconnect import ClientGoneError, until_disconnect
from stoker_engine.server.conversation.text_events import EncodedEvent, Event, encoded
from stoker_engine.server.conversation.usage import Usage
from stoker_engine.server.errors.description import log_unexpected

#: Request header that requests usage in events.
USAGE_HEADER = "x-stoker-usage"


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
        events: AsyncGenerator[Sequence[Event | EncodedEvent], None],
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
            await until_disconnect(receive, self._send_all(scope, send, tells_usage=tells_usage))
        except ClientGoneError:
            return

    async def _send_all(self, scope: Scope, send: Send, *, tells_usage: bool) -> None:
        started = False
        end = self._framing.last
        write = body_writer(scope, send)
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
                    await write(self._framed([encoded(each) for each in some], tells_usage=tells_usage))
        except Exception as error:
            if not started:
                raise
            log_unexpected(error)
            end = self._framing.error(error)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _framed(self, events: list[EncodedEvent], *, tells_usage: bool) -> bytes:
        data = [each.data for each in events]
        if tells_usage:  # in the last event
            data[-1] = data[-1][:-1] + self._counted()
        if not self._framing.named:
            return b"".join(map(event, data))
        return b"".join(event(each, of.type) for each, of in zip(data, events, strict=True))

    def _counted(self) -> bytes:
        """Return the end of an event's JSON: the field `stoker_usage` and the closing brace."""
        usage = self._usage()
        cached = b"" if usage.cached_tokens is None else b',"cached_tokens":%d' % usage.cached_tokens
        counts = usage.prompt_tokens, usage.completion_tokens, cached
        return b',"stoker_usage":{"prompt_tokens":%d,"completion_tokens":%d%b}}' % counts


def event(data: bytes, name: str = "") -> bytes:
    """Return an encoded event, with a line for its name if `name` is not empty."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: %b\n\n" % data
