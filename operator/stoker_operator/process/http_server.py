"""An HTTP server in the operator's event loop, with a beginning and an end."""

from __future__ import annotations

import ssl

from aiohttp import web


class HTTPServer:
    """Serves `app`.

    Args:
        app: what answers.
        address: HOST:PORT to listen on; port 0 means any that is free.
        tls: the server's TLS context; None means plain HTTP.
    """

    def __init__(self, app: web.Application, address: str, tls: ssl.SSLContext | None = None) -> None:
        self._address, self._tls = address, tls
        # Who has gone needs no answer, and a handler that is at work is given this long to finish.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2)

    async def start(self) -> None:
        """Begins to answer.

        Raises:
            OSError: the address cannot be listened on.
        """
        await self._runner.setup()
        host, _, port = self._address.rpartition(":")
        await web.TCPSite(self._runner, host.strip("[]") or None, int(port), ssl_context=self._tls).start()

    async def stop(self) -> None:
        """Answers the requests in flight, and accepts no more."""
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port it listens on; known after `start`."""
        port: int = self._runner.addresses[0][1]
        return port
