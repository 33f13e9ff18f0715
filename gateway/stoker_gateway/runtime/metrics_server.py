"""HTTP server for ``/metrics`` (the picker's and Envoy's metrics) and ``/scaling`` (the report for autoscalers).

Envoy's metrics come from its admin interface, which is not exposed, because clients could stop Envoy through it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from stoker_gateway.errors import GatewayError
from stoker_gateway.registry.addresses import bind


class MetricsServer:
    """Serves metrics, and the report for autoscalers.

    Args:
        registry: metrics of this process.
        envoy_statistics: returns Envoy's metrics in Prometheus' format; on `GatewayError` they are left out.
        host: IP address to listen on.
        port: port to listen on; 0 chooses a free one.
        scaling: returns the report for autoscalers in JSON; while it returns None, the status is 503. If `scaling` is
            None, the server has no path ``/scaling``.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        envoy_statistics: Callable[[], Awaitable[str]],
        host: str,
        port: int,
        scaling: Callable[[], bytes | None] | None = None,
    ) -> None:
        self._registry = registry
        self._envoy_statistics = envoy_statistics
        self._host, self._port = host, port
        app = web.Application(client_max_size=1024)
        app.router.add_get("/metrics", self._answer)
        if scaling is not None:
            app.router.add_get("/scaling", _answer_with(scaling))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)

    async def start(self) -> int:
        """Start the server, and return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._runner.setup()
        await web.SockSite(self._runner, bind(self._host, self._port)).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Stop the server."""
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        text = await asyncio.to_thread(generate_latest, self._registry)
        with contextlib.suppress(GatewayError):
            text += (await self._envoy_statistics()).encode()
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE_LATEST})


def _answer_with(scaling: Callable[[], bytes | None]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        if (report := scaling()) is None:
            return web.Response(
                status=503, text="the gateway has no complete report yet; try again\n", headers={"retry-after": "1"}
            )
        return web.Response(body=report, content_type="application/json")

    return answer
