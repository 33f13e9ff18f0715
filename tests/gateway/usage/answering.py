"""A scripted server behind Envoy and the picker, with the command's configuration."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.runtime.listeners import answered_listener, ended_listener
from stoker_gateway.scheduling.picker import EndpointPicker
from stoker_gateway.usage.access_log_service import AccessLogService
from stoker_gateway.usage.completed_request import CompletedRequest

from ...support.waiting import until_async

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Behind:
    """The running parts.

    Attributes:
        handler: handles requests at the server.
        ended: completed requests.
    """

    handler: Handler
    url: str = ""
    servers: tuple[str, ...] = ()
    picker: EndpointPicker = field(default_factory=EndpointPicker)
    ended: list[CompletedRequest] = field(default_factory=list)

    async def next_end(self) -> CompletedRequest:
        """Return the oldest completed request that was not returned yet."""
        async with asyncio.timeout(60):
            await until_async(lambda: self.ended)
        return self.ended.pop(0)


async def _none(_: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


@asynccontextmanager
async def behind(handler: Handler | None, addresses: tuple[str, ...] = ()) -> AsyncIterator[Behind]:
    """Run a server of the model m with this handler, after others at these addresses."""
    made = Behind(handler or _none)
    app = web.Application(client_max_size=64 << 20)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await made.handler(request)

    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.servers = (*addresses, *([f"127.0.0.1:{runner.addresses[0][1]}"] if handler else []))
    model_registry = ModelRegistry({"m": Endpoint("m", "cluster-m", made.servers)})
    made.picker.set_servers(made.servers, time.monotonic())
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        settings = EnvoySettings("127.0.0.1", 0, Path(folder), max_wait_s=5, threads=1)
        EnvoyFiles(settings).write(model_registry)
        server, envoy = PickerServer(model_registry, {"m": made.picker}), EnvoyProcess(settings)
        server.serve_also(
            AccessLogService(
                [
                    ended_listener({"m": made.picker}, server.wake),
                    answered_listener(server.answered),
                    made.ended.append,
                ]
            ).register
        )
        server.listen(f"unix:{settings.picker_socket}")
        await server.start()
        try:
            await envoy.start()
            made.url = f"http://127.0.0.1:{await envoy.port()}"
            yield made
        finally:
            await envoy.end()
            await server.stop(0)
            await runner.cleanup()
