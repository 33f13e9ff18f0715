"""uvicorn's HTTP/1.1 connection with this server's error format, a limit on headers, and limits on slow clients.

slow part                            limit                                      reaction
request line and headers             --request-header-timeout in total          408
body                                 --min-request-body-data-rate over each     408; connection closed if the response
                                     span of --request-body-timeout             has already started
reading the response                 --send-timeout without reading a byte      connection aborted
next request                         keep-alive timeout of idle connections     connection closed

For a client that does not read, the operating system would buffer megabytes, and the engine would keep generating them.
So the kernel buffers at most `_UNSENT_BYTES` beyond the client's receive window, and this process at most one write: a
stream waits for its reader.

`uvicorn_internals` lists the undocumented parts of uvicorn that this module uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import socket
import struct
import termios
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import h11
from starlette.exceptions import HTTPException
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.connection import body_writer
from stoker_engine.server.errors import handlers
from stoker_engine.server.http.stall_timer import StallTimer

logger = logging.getLogger(__name__)

#: Seconds for which a refused client's connection stays half-open, so that the client can read the response.
_LINGER_S = 2
_UNSENT_BYTES = 16 * 1024


class _LimitedConnection(h11.Connection):
    """Limits the number of headers; h11 limits only the bytes of a request's head.

    Attributes:
        is_head_too_large: whether `next_event` raised because the head exceeds a limit.
    """

    def __init__(self, max_incomplete_event_size: int, max_header_count: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self.is_head_too_large = False
        self._max_header_count = max_header_count
        self._lines = 0

    def receive_data(self, data: bytes) -> None:
        """Buffer received bytes. Counts a head's lines on arrival, because parsing a million headers takes seconds."""
        self._lines = self._lines + data.count(b"\n") if self.their_state is h11.IDLE else 0
        super().receive_data(data)

    def next_event(self) -> Any:
        """Return h11's next event.

        Raises:
            h11.RemoteProtocolError: the bytes are not HTTP, or the head is too large.
        """
        is_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.is_head_too_large = is_head and error.error_status_hint == 431
            raise
        if isinstance(event, h11.Request):
            self._lines = 0
            too_many = len(event.headers) > self._max_header_count
        else:
            too_many = is_head and self._lines > self._max_header_count + 1  # 1: the request line
        if too_many:
            self.is_head_too_large = True
            raise h11.RemoteProtocolError(f"more than {self._max_header_count} headers", 431)
        return event


def http_protocol(args: FrontendArgs) -> type[H11Protocol]:
    """Return the connection class of a server with the limits of `args`."""

    class Connection(H11Protocol):
        conn: _LimitedConnection

        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, {**app_state, body_writer.STATE: self._write_body}, _loop)
            self._refused = False
            self._received = 0  # bytes
            self.conn = _LimitedConnection(args.h11_max_incomplete_event_size, args.h11_max_header_count)
            seconds, rate = args.request_body_timeout, args.min_request_body_data_rate
            self._head = StallTimer(self.loop, args.request_header_timeout, math.inf, self._num_received, self._on_head)
            self._body = StallTimer(self.loop, seconds, max(1, seconds * rate), self._num_received, self._on_body)
            self._reader = StallTimer(self.loop, args.send_timeout, 1, self._num_taken, self._on_reader)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=1)  # with 0 a TLS transport pauses although its buffer is empty
            sock = transport.get_extra_info("socket")
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(AttributeError, OSError):  # not every system supports it
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head, self._body, self._reader):
                timer.stop()
            self._unset_keepalive_if_required()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            self._received += len(data)
            self.server_state.default_headers = [_date()]
            super().data_received(data)

        def handle_events(self) -> None:
            super().handle_events()
            state = None if self._refused else self.conn.their_state
            self._head.run(state is h11.IDLE and (self._head.is_running or self.conn.trailing_data[0] != b""))
            self._body.run(state is h11.SEND_BODY)

        def shutdown(self) -> None:
            if self._refused:
                self.transport.close()
            else:
                super().shutdown()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader.run(True)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reader.run(False)

        async def _write_body(self, data: bytes) -> None:
            """Write a part of a chunked body as `cycle.send` would, without h11, whose state does not depend on it."""
            cycle = self.cycle
            if self.flow.write_paused and not cycle.disconnected:
                await self.flow.drain()
            if data and not cycle.disconnected:
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        def send_400_response(self, msg: str) -> None:
            if self.conn.is_head_too_large:
                sentence = (
                    f"the request line and headers exceed {args.h11_max_header_count} headers "
                    f"or {args.h11_max_incomplete_event_size} bytes"
                )
                self._refuse(431, sentence)
            else:
                self._refuse(400, "invalid HTTP request")

        def _refuse(self, status: int, sentence: str) -> None:
            """Send an error, unless a response has started, and close the connection."""
            self._refused = True
            self._unset_keepalive_if_required()
            cycle = self.cycle
            scope = None if cycle is None or cycle.response_complete else cycle.scope
            body = bytes(handlers.response(HTTPException(status, sentence), scope).body)
            headers = [
                _date(),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            with contextlib.suppress(h11.LocalProtocolError):
                for event in (
                    h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.waiting_for_100_continue = False
                self.cycle.message_event.set()
            if not self.transport.can_write_eof():
                self.transport.close()
                return
            # Closing a socket with unread bytes resets the connection, and the client may lose the response.
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)

        def _num_received(self) -> int:
            return self._received

        def _num_taken(self) -> int:
            """Return the negated number of pending bytes: it grows as the client reads, while nothing is written."""
            return -self.transport.get_write_buffer_size() - _unsent(self.transport.get_extra_info("socket"))

        def _on_head(self) -> None:
            self._cut_off(f"its headers were not complete after {args.request_header_timeout:g} s")

        def _on_body(self) -> None:
            if not self.transport.is_reading():  # the server is slow, not the client
                self._body.run(True)
                return
            rate = args.min_request_body_data_rate
            slow = f"its body arrived at less than {rate} bytes/s" if rate else "no byte of its body arrived"
            self._cut_off(f"{slow} for {args.request_body_timeout:g} s")

        def _cut_off(self, reason: str) -> None:
            logger.info("%s - a request timed out: %s", _peer(self.client), reason)
            self._refuse(408, f"the request timed out: {reason}")

        def _on_reader(self) -> None:
            logger.info("%s - connection aborted: nothing was read for %g s", _peer(self.client), args.send_timeout)
            self.transport.abort()

    return Connection


def _unsent(sock: socket.socket) -> int:
    """Return the number of bytes in the socket's send queue: unsent or unacknowledged."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0


def _date() -> tuple[bytes, bytes]:
    return b"date", formatdate(usegmt=True).encode()


def _peer(client: tuple[str, int] | None) -> str:
    return f"{client[0]}:{client[1]}" if client else "a client"
