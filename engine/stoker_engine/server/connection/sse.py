"""Server-sent events: ``data: {json}`` for each event, ``data: [DONE]`` at the end.

The status and the headers wait for the first event, so that a request the engine refuses still gets its 400.
After that an error can only be sent as an event; the stream then ends without ``[DONE]``, which nobody can
take for a complete answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker_engine.server.connection.disconnect import ClientGoneError, until_disconnect
from stoker_engine.server.openai import errors

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends `events` as they come, those that come together in one piece; closes them when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Sequence[BaseModel], None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]  # it grows while it is sent
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGoneError:
            return

    async def _send_all(self, send: Send) -> None:
        started = False
        end = _DONE
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
                    data = b"".join(_event(event.model_dump_json().encode()) for event in some)
                    await _send_body(send, data, more=True)
        except Exception as error:
            if not started:
                raise
            errors.log_unexpected(error)
            _, body = errors.describe(error)
            end = _event(errors.encode(body))
        await _send_body(send, end, more=False)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
