"""The operator's ``/healthz``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from stoker_operator.process.http_server import HTTPServer
from stoker_operator.process.metrics import Metrics


class Health:
    """The HTTP server of probes and metrics.

    Args:
        address: HOST:PORT to listen on.
        metrics: the metrics to expose.
        ready: conditions of readiness by description, such as "the cluster has been listed".
    """

    def __init__(self, address: str, metrics: Metrics, ready: Mapping[str, Callable[[], bool]]) -> None:
        self._metrics, self._ready = metrics, ready
        self._leaving = False
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show_metrics)
        self._server = HTTPServer(app, address)

    async def start(self) -> None:
        """Start to listen.

        Raises:
            OSError: listening on the address failed.
        """
        await self._server.start()

    def leave(self) -> None:
        """Report not ready from now on."""
        self._leaving = True

    async def stop(self) -> None:
        """Stop the server."""
        await self._server.stop()

    @property
    def port(self) -> int:
        """The port that the server listens on; known after `start`."""
        return self._server.port

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")  # an answer shows that the event loop runs

    async def _readyz(self, _: web.Request) -> web.Response:
        missing = (
            ["shutting down"]
            if self._leaving
            else [f"not yet: {name}" for name, is_ready in self._ready.items() if not is_ready()]
        )
        return web.Response(status=503 if missing else 200, text="\n".join(missing or ["ok"]) + "\n")

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
