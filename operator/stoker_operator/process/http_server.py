"""An HTTP server in the operator's event loop."""

from __future__ import annotations

import ssl

from aiohttp import web


class HTTPServer:
    """Serves an aiohttp application.

    Args:
        address: HOST:PORT to listen on; port 0 is any free port.
        tls: the server's TLS context, or None for plain HTTP.
    """

    def __init__(self, app: web.Application, address: str, tls: ssl.SSLContext | None = None) -> None:
        self._address, self._tls = address, tls
        # shutdown_timeout: seconds for which `stop` waits for running handlers.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2)

    async def start(self) -> None:
        """Start to listen.

        Raises:
            OSError: listening on the address failed.
        """
        await self._runner.setup()
        host, _, port = self._address.rpartition(":")
        await web.TCPSite(self._runner, host.strip("[]") or None, int(port), ssl_context=self._tls).start()

    async def stop(self) -> None:
        """Accept no more requests, and wait a limited time for those in flight."""
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port that the server listens on; known after `start`."""
        port: int = self._runner.addresses[0][1]
        return port
