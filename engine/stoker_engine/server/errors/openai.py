"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

what happened                                   status
the body is not JSON, or not what we know       400      (FastAPI would say 422)
a RequestError                                  its own: 400, 401, 404, 413, 429, 500, 503
unknown path, wrong method                      404, 405
anything else is our mistake                    500      the traceback goes to the log, never to the client
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stoker_common.errors import EngineDeadError, RequestError
from stoker_engine.server.connection.disconnect import ClientGoneError

logger = logging.getLogger(__name__)

#: OpenAI's codes for what pydantic found.
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported": "unsupported_value",
}
_CLIENT_GONE = 499  # nginx's number: no standard one exists, and nobody receives it


class ErrorInfo(BaseModel):
    """What went wrong, for a person (`message`) and for a program (the rest)."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every status from 400 on, and the last event of a stream that fails."""

    error: ErrorInfo


def describe(error: Exception) -> tuple[int, ErrorResponse]:
    """The HTTP status and the body that report `error` to a client."""
    match error:
        case RequestError():
            return error.status, _body(error.message, error.type, error.param, error.code)
        case RequestValidationError():
            return 400, _invalid(error.errors())
        case HTTPException(status_code=404):
            return 404, _body("there is no such path; GET /openapi.json lists them", "not_found_error")
        case HTTPException(status_code=405):
            return 405, _body("this path does not take this HTTP method", "invalid_request_error")
        case HTTPException():
            return error.status_code, _body(error.detail, "invalid_request_error")
        case ClientGoneError() | ClientDisconnect():
            return _CLIENT_GONE, _body("the client closed the connection", "invalid_request_error")
        case _:
            return 500, _body("internal error; the server's log says more", EngineDeadError.type)


def encode(body: ErrorResponse) -> bytes:
    """`body` as JSON. ASCII, because a message may quote what is not valid Unicode."""
    return json.dumps(body.model_dump()).encode()


def _body(message: str, type: str, param: str | None = None, code: str | None = None) -> ErrorResponse:
    return ErrorResponse(error=ErrorInfo(message=message, type=type, param=param, code=code))


def _invalid(errors: Sequence[Any]) -> ErrorResponse:
    """Names the first thing that is wrong with a body; clients show one sentence."""
    first = errors[0]
    kind, where = first["type"], first["loc"][1:]
    if not where:
        return _body(
            "the request body must be a JSON object, sent as Content-Type: application/json",
            "invalid_request_error",
        )
    param = _path(where)
    message = {
        "extra_forbidden": f"unknown field {param!r}",
        "missing": f"the field {param!r} is required",
    }.get(kind, f"{param}: {first['msg']}")
    return _body(message, "invalid_request_error", param, _CODES.get(kind, "invalid_value"))


def _path(where: Sequence[str | int]) -> str:
    """``("messages", 0, "content")`` → ``messages[0].content``, as OpenAI writes it."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)
    return path.removeprefix(".")[:100]


def log_unexpected(error: Exception) -> None:
    """Logs our mistakes. A `RequestError` was returned to its client, and who made it has logged its cause."""
    if not isinstance(error, RequestError):
        logger.error("a request failed", exc_info=error)
