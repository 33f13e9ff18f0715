"""Strict parsing of bodies. Python's `json` also accepts NaN, and lone surrogates, which tokenizers cannot encode."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


class JSONRequest(Request):
    """A request whose body must be standard JSON."""

    async def json(self) -> Any:
        """Return the parsed body."""
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the request body is not valid JSON: {error}") from error


class JSONRoute(APIRoute):
    """A route that parses its body with `JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, wrapped to receive a `JSONRequest`."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JSONRequest(request.scope, request.receive))

        return handle_json
