"""Exception handlers: errors → responses in the format of the requested API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from stoker_common.errors import EngineDeadError, OverloadedError, RequestError
from stoker_engine.server.connection.disconnect import ClientGoneError
from stoker_engine.server.errors import anthropic as anthropic
from stoker_engine.server.errors import openai as openai
from stoker_engine.server.errors.description import describe
from stoker_engine.server.errors.unknown_path import unknown_path
from stoker_engine.server.unavailable import NotStartedError, UnauthorizedError, UnavailableError

#: Header of a response to a request that was not started, so that a gateway may send it to another server.
NOT_BEGUN_HEADER: Final = "x-stoker-not-begun"


def install(app: FastAPI) -> None:
    """Register the handlers on `app`."""
    app.add_exception_handler(RequestError, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(404, _answer_unknown_path)
    app.add_exception_handler(ClientGoneError, _answer)
    app.add_exception_handler(ClientDisconnect, _answer)
    app.add_exception_handler(Exception, _answer)


def response(error: Exception, scope: Mapping[str, Any] | None) -> Response:
    """Return the response that reports `error`.

    Args:
        scope: the request's; None if no valid request was received.
    """
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, UnavailableError | OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, UnavailableError | EngineDeadError):
        headers["connection"] = "close"  # for the next request to reach another server
    if isinstance(error, NotStartedError):
        headers[NOT_BEGUN_HEADER] = "1"
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    described = describe(error)
    if scope is not None and anthropic.is_anthropic(scope):
        name = scope.get("state", {}).get("request_id")
        if name is not None:
            headers[anthropic.HEADER] = name
        body = anthropic.encode(described, name)
    else:
        body = openai.encode(described)
    return Response(body, described.status, headers, media_type="application/json")


async def _answer(request: Request, error: Exception) -> Response:
    return response(error, request.scope)


async def _answer_unknown_path(request: Request, error: Exception) -> Response:
    return response(HTTPException(404, unknown_path(request.scope)), request.scope)
