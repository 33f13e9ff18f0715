"""Counts requests in flight. In a shutdown responses have ``Connection: close``; later, requests are refused."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker_engine.server.engine.lifecycle import Lifecycle
from stoker_engine.server.errors import handlers
from stoker_engine.server.middleware.body_limit import discard
from stoker_engine.server.paths import OPEN_PATHS, route_path
from stoker_engine.server.unavailable import NotStartedError


class InFlightMiddleware:
    """Reports requests to `lifecycle`, or refuses them if the server is closed. `OPEN_PATHS` are exempt."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, max_request_bytes: int) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._lifecycle.leaving:
                MutableHeaders(scope=message)["connection"] = "close"  # for the next request to reach another server
            await send(message)

        if route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send_last)
            return
        try:
            self._lifecycle.check_open()
        except NotStartedError as error:
            await discard(receive, self._max_request_bytes)
            await handlers.response(error, scope)(scope, receive, send_last)
            return
        self._lifecycle.enter()
        try:
            await self._app(scope, receive, send_last)
        finally:
            self._lifecycle.leave()
