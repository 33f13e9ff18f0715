"""uvicorn's HTTP/1.1 connection, with what it lacks: our errors for what is no HTTP, and a limit on headers."""

from __future__ import annotations

import asyncio
import contextlib
from email.utils import formatdate
from typing import Any

import h11
from starlette.exceptions import HTTPException
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from stoker_engine.server import errors

#: How long a client that speaks no HTTP may go on, so that it comes to read our answer.
_LINGER_S = 2


class _LimitedConnection(h11.Connection):
    """h11 limits the bytes of a request's head; this limits its headers too."""

    def __init__(self, max_incomplete_event_size: int, max_header_count: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._max_header_count = max_header_count

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and len(event.headers) > self._max_header_count:
            raise h11.RemoteProtocolError(f"more than {self._max_header_count} headers")
        return event


def http_protocol(max_incomplete_event_size: int, max_header_count: int) -> type[H11Protocol]:
    """The connection class of a server with these limits."""

    class Connection(H11Protocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop)
            self._refused = False
            self.conn = _LimitedConnection(max_incomplete_event_size, max_header_count)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            super().data_received(data)

        def send_400_response(self, msg: str) -> None:
            body = bytes(errors.response(HTTPException(400, "this is no HTTP request that this server can read")).body)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            # Where an answer has begun already, the connection can only be closed.
            with contextlib.suppress(h11.LocalProtocolError):
                for event in (
                    h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            self._refused = True
            if not self.transport.can_write_eof():
                self.transport.close()
                return
            # To close a socket that holds unread bytes resets the connection, and the client loses our answer.
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)

    return Connection
