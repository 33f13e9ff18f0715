"""Servers that respond at once and compute nothing, to measure what runs in front of them.

    python benchmarks/stub_servers.py NUMBER EVENTS INTERVAL_S

It prints the servers' ports in one line. Each POST gets a stream of EVENTS events: the first at once, then one every
INTERVAL_S seconds. One process with one event loop runs all servers, with just enough HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import gc
import re
import resource
import sys
from typing import Final

_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_METRICS: Final = b'vllm:num_requests_running{model_name="m"} 0\nvllm:num_requests_waiting{model_name="m"} 0\n'
_TOKEN: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_EVENT: Final = _chunk(_TOKEN)
_END: Final = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self, events: int, interval_s: float) -> None:
        self._events = events
        self._interval_s = interval_s
        self._read = bytearray()
        self._transport: asyncio.Transport | None = None
        self._next: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._read[:end])
            length = _LENGTH.search(head)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._read) < size:
                return
            del self._read[:size]
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"POST "):
            self._transport.write(_HEAD + _EVENT)
            self._later(self._events - 1)
        else:
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(_METRICS), _METRICS))

    def _later(self, remaining: int) -> None:
        self._next = asyncio.get_running_loop().call_later(self._interval_s, self._event, remaining)

    def _event(self, remaining: int) -> None:
        assert self._transport is not None
        self._next = None
        if remaining:
            self._transport.write(_EVENT)
            self._later(remaining - 1)
        else:
            self._transport.write(_END)


async def serve(number: int, events: int, interval_s: float) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    ports = []
    for _ in range(number):
        server = await loop.create_server(lambda: Stub(events, interval_s), "127.0.0.1", 0, backlog=4096)
        ports.append(server.sockets[0].getsockname()[1])
    gc.freeze()
    print(*ports, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
