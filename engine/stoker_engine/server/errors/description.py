"""Description of an error, independent of the API: its status, its message and the invalid field.

cause                                           status
invalid JSON, or a body that fails validation   400      (FastAPI's default is 422)
a RequestError                                  its own: 400, 401, 403, 404, 413, 429, 500, 503
unknown path, wrong method                      404, 405
any other HTTPException                         its own
disconnected client                             499      for the log only
any other exception                             500      the traceback is logged and never sent to the client
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stoker_common.errors import EngineDeadError, RequestError
from stoker_engine.server.connection.disconnect import ClientGoneError

logger = logging.getLogger(__name__)

#: Types of validation errors → OpenAI's error codes.
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported": "unsupported_value",
}
_CLIENT_GONE = 499  # nginx's code for a closed request; HTTP has none, and it never reaches a client


@dataclass(frozen=True)
class ErrorDescription:
    """An error as reported to a client.

    Attributes:
        type, code: OpenAI's identifiers, for programs.
        param: path of the invalid field.
    """

    status: int
    message: str
    type: str = RequestError.type
    param: str | None = None
    code: str | None = None


def describe(error: Exception) -> ErrorDescription:
    """Return the description of `error`."""
    match error:
        case RequestError():
            return ErrorDescription(error.status, error.message, error.type, error.param, error.code)
        case RequestValidationError():
            return _invalid(error.errors())
        case HTTPException(status_code=404):
            return ErrorDescription(404, error.detail, "not_found_error")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow")
            methods = f"; it supports {', '.join(sorted(allowed.split(', ')))}" if allowed else ""
            return ErrorDescription(405, f"this path does not support this HTTP method{methods}")
        case HTTPException():
            return ErrorDescription(error.status_code, error.detail)
        case ClientGoneError() | ClientDisconnect():
            return ErrorDescription(_CLIENT_GONE, "the client closed the connection")
        case _:
            return ErrorDescription(500, "internal error; see the server's log for details", EngineDeadError.type)


def _invalid(errors: Sequence[Any]) -> ErrorDescription:
    """Describe the first validation error."""
    first = errors[0]
    kind, where = first["type"], first["loc"][1:]
    if not where:
        return ErrorDescription(400, "the request body must be a JSON object, sent as Content-Type: application/json")
    param = _path(where)
    message = {
        "extra_forbidden": f"unknown field {param!r}",
        "missing": f"the field {param!r} is required",
    }.get(kind, f"{param}: {first['msg']}")
    return ErrorDescription(400, message, param=param, code=_CODES.get(kind, "invalid_value"))


def _path(where: Sequence[str | int]) -> str:
    """Return a field's path as OpenAI writes it: ``("messages", 0, "content")`` → ``messages[0].content``."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)
    return path.removeprefix(".")[:100]


def log_unexpected(error: Exception) -> None:
    """Log an error, except a `RequestError`, whose message the client receives."""
    if not isinstance(error, RequestError):
        logger.error("a request failed", exc_info=error)
