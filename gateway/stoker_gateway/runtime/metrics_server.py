"""``/metrics``, on a port of its own: what the picker counts, and what Envoy does. ``/scaling`` there is what the
operator's autoscaler reads.

Envoy's are read from its administration interface, which nobody else reaches: whoever did could end Envoy.
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
    """Serves metrics to Prometheus and reports to the autoscaler, and nothing else.

    Args:
        registry: what this process counts.
        envoy_statistics: Envoy's metrics as Prometheus reads them; raises `GatewayError` if it cannot be
            asked, and then they are left out.
        host: the IP address to listen on.
        port: the port; 0: one that is free.
        scaling: makes the report for the autoscaler, in JSON; its None: there is none yet, which is answered with 503.
            None: no endpoint is scaled.
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
        """Begins to answer; returns the port.

        Raises:
            OSError: it cannot be listened there.
        """
        await self._runner.setup()
        await web.SockSite(self._runner, bind(self._host, self._port)).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Ends."""
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
