"""``X-Request-Id``: taken from the client or generated, returned in the response, and added to log lines."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker_common import logs
from stoker_engine.server.fields.field_types import REQUEST_ID

HEADER = "x-request-id"


def request_id(request: Request, requested: str | None) -> str:
    """Return the id of a request: its header's, else `requested` (of its body), else the generated one."""
    state = request.scope["state"]
    made: str = state["request_id"]
    if state["request_id_given"] or requested is None:
        return made
    logs.request_id.set(requested)  # replaces the generated id until the middleware resets it
    return requested


class RequestIdMiddleware:
    """Gives each request its id. Invalid ids are ignored, because some proxies send them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        requested = Headers(scope=scope).get(HEADER, "")
        is_one = REQUEST_ID.fullmatch(requested) is not None
        name = requested if is_one else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=name, request_id_given=is_one)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(HEADER, name)
            await send(message)

        token = logs.request_id.set(name)
        try:
            await self._app(scope, receive, send_named)
        finally:
            logs.request_id.reset(token)
