"""Writing a streamed body directly to the connection.

Each event of a stream would pass every middleware and the HTTP library, which only need the headers. So a connection
puts a function into the state of its requests that frames a part of the body and writes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.types import Scope, Send

#: Sends a part of a body; waits first while the client does not read. Does nothing once the client is gone.
WriteBody = Callable[[bytes], Awaitable[None]]

#: Key of the connection's `WriteBody` in the state of a request.
STATE: Final = "write_body"


def body_writer(scope: Scope, send: Send) -> WriteBody:
    """Return a function that writes parts of a response that has been started without ``Content-Length``. The last
    part must be sent by `send`.

    HTTP/1.0 has no framing for parts, and other ASGI servers than ours have no such function: there `send` is used.
    """
    direct: WriteBody | None = scope.get("state", {}).get(STATE)
    if direct is not None and scope["http_version"] == "1.1":
        return direct

    async def by_message(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    return by_message
