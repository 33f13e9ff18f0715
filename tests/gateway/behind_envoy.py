"""Envoy's real program with the gateway's configuration, between a scripted picker and scripted servers."""

from __future__ import annotations

import asyncio
import json
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry

from ..support.waiting import until_async
from .scripted_picker import ScriptedPicker

CHAT = "/v1/chat/completions"


class Server:
    """A server that counts requests, and responds as `does` says.

    Attributes:
        does: ``answer``: 200 and its name; ``fail``: 500; ``refuse``: 503, not started; ``hang``: nothing until `more`
        is
            set; ``reset``, ``close``: resets or closes the connection without a response; ``break``: one event of a
            stream, then a reset; ``stream``: an event each time `more` is set, until `last`; ``flood``: a stream as
            fast as it is read, until `last`.
        requests: heads of received requests, except GETs, which poll the server.
        sent: bytes of floods.
        wants: required ``Authorization`` of requests for models or answers, otherwise 401; None for any.
        listed: number of successful requests for its models.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.does = "answer"
        self.requests: list[bytes] = []
        self.news = asyncio.Event()
        self.body = b""
        self.more = asyncio.Event()
        self.last = False
        self.sent = 0
        self.wants: str | None = None
        self.listed = 0
        self.address = ""
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Accept connections, at the same port as before if it was started already."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=1 << 20)
        self._port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Refuse connections, and reset existing ones."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def until_requests(self, times: int) -> None:
        """Wait until it has received `times` requests."""
        while len(self.requests) < times:
            self.news.clear()
            await self.news.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                is_model_request = not head.startswith(b"GET ")
                credentials = b"" if self.wants is None else f"authorization: {self.wants}\r\n".lower().encode()
                if credentials not in head.lower() and (is_model_request or head.startswith(b"GET /v1/models")):
                    await _body(head, reader)
                    writer.write(b"HTTP/1.1 401 x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                self.listed += head.startswith(b"GET /v1/models")
                if is_model_request:
                    self.requests.append(head)
                    self.news.set()
                self.body = await _body(head, reader)
                if is_model_request and self.does == "hang":
                    await self.more.wait()
                if is_model_request and self.does in ("reset", "close", "break"):
                    if self.does == "break":
                        writer.write(_STREAM + _chunk(b"data: 1\n\n"))
                        await writer.drain()
                        await self.more.wait()
                    if self.does != "close":
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, linger)
                    break
                if is_model_request and self.does == "flood":
                    writer.write(_STREAM)
                    while not self.last:
                        writer.write(_chunk(b"x" * (1 << 16)))
                        self.sent += 1 << 16
                        await writer.drain()
                if is_model_request and self.does == "stream":
                    await self._stream(writer)
                    continue
                body = json.dumps({"server": self.name, "size": len(self.body)}).encode()
                status = {"fail": b"500 x", "refuse": b"503 x"}.get(self.does, b"200 OK")
                fields = b"content-type: application/json\r\ncontent-length: %d" % len(body)
                if self.does == "refuse":
                    fields += b"\r\nx-stoker-not-begun: 1"
                writer.write(b"HTTP/1.1 %s\r\n%s\r\n\r\n%s" % (status, fields, body))
                await writer.drain()
        self._writers.discard(writer)
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_STREAM)
        while not self.last:
            writer.write(_chunk(b"data: 1\n\n"))
            await writer.drain()
            await self.more.wait()
            self.more.clear()
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    if b"content-length" in fields:
        return await reader.readexactly(int(fields[b"content-length"]))
    body = b""
    while fields.get(b"transfer-encoding") == b"chunked":
        size = int((await reader.readline()).strip(), 16)
        body += (await reader.readexactly(size + 2))[:-2]
        if not size:
            break
    return body


class Gateway:
    """The running gateway."""

    def __init__(self, settings: EnvoySettings, servers: list[Server]) -> None:
        self.settings, self.servers = settings, servers
        self.files = EnvoyFiles(settings)
        self.picker: Any = ScriptedPicker("cluster-m", ",".join(each.address for each in servers))
        self.grpc_server: Any = None
        self.envoy = EnvoyProcess(settings)
        self.port = 0

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    async def raw(self, text: bytes, then: bytes = b"", timeout_s: float = 30) -> bytes:
        """Send `text`, then `then` repeatedly, and return everything received until the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(text)

        async def go_on() -> None:
            while then:
                await asyncio.sleep(0.05)  # sleeps: a client that sends slowly
                writer.write(then)

        more = asyncio.create_task(go_on())
        answer = b""
        try:
            with suppress(ConnectionError):
                while part := await asyncio.wait_for(reader.read(1 << 16), timeout_s):
                    answer += part
            return answer
        finally:
            more.cancel()
            writer.close()

    async def until(self, name: str, count: int) -> None:
        """Wait until Envoy's statistic `name` is `count`."""

        async def holds() -> bool:
            return await self.envoy.statistic(name) == count

        await until_async(holds)


def registry_of(*servers: Server) -> ModelRegistry:
    """Return a registry with the model m on these servers."""
    return ModelRegistry({"m": Endpoint("m", "cluster-m", tuple(each.address for each in servers))})


@asynccontextmanager
async def gateway(number: int = 2, **chosen: Any) -> AsyncIterator[Gateway]:
    """Run `number` servers behind Envoy, with the chosen settings."""
    chosen = {"max_wait_s": 1, "max_body_bytes": 24 << 20, "threads": 1} | chosen
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        servers = [Server("abcdefgh"[each]) for each in range(number)]
        for server in servers:
            await server.start()
        made = Gateway(EnvoySettings("127.0.0.1", 0, Path(folder), **chosen), servers)
        made.files.write(registry_of(*servers))
        made.grpc_server = await made.picker.serve(made.settings.picker_socket)
        try:
            await made.envoy.start()
            made.port = await made.envoy.port()
            yield made
        finally:
            await made.envoy.end()
            await made.grpc_server.stop(0)
            for server in servers:
                await server.stop()
