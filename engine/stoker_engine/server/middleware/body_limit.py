"""Size limit of request bodies, with or without a Content-Length header."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker_engine.server.errors import handlers
from stoker_engine.server.unavailable import TooLargeError


class BodyLimitMiddleware:
    """Answers 413 to a body of more than `limit` bytes, before reading it if Content-Length declares its size."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sentence = f"the request body is larger than {self._limit} bytes"
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > self._limit:
            await handlers.response(TooLargeError(sentence), scope)(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(TooLargeError.status, sentence)  # FastAPI replaces other errors while reading
            return message

        await self._app(scope, receive_limited, send)


async def discard(receive: Receive, limit: int) -> None:
    """Read and discard a body, until it exceeds `limit` bytes.

    Closing a connection with unread bytes resets it, and the client may lose the response.
    """
    received = 0
    while received <= limit:
        message = await receive()
        received += len(message.get("body", b""))
        if not message.get("more_body", False):
            return
