"""Errors in Anthropic's shape: ``{"type": "error", "error": {"type", "message"}, "request_id"}``.

https://docs.anthropic.com/en/api/errors. There is no field for what is wrong with the request, so the message names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel

from stoker_engine.server.errors import openai
from stoker_engine.server.fields.field_types import Extra
from stoker_engine.server.paths import route_path

#: The header of every answer that names the request.
HEADER: Final = "request-id"

#: Anthropic's names, by HTTP status. Its own overloaded server has 529; ours has HTTP's 503.
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


#: The code by which clients know that they have to send whole conversations.
NO_THREADS: Final = "thread_unsupported_request"


class AnthropicErrorDetails(BaseModel):
    """A code that clients act on."""

    error_code: str


class AnthropicError(BaseModel):
    """What went wrong, for a program and for a person."""

    type: str
    message: str
    details: Extra[AnthropicErrorDetails] = None


class AnthropicErrorResponse(BaseModel):
    """The body of every status from 400 on, and the event `error` of a stream that fails."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str | None = None


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether a request is of this API, and wants its errors."""
    path = route_path(scope)
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def describe(error: Exception, request_id: str | None) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body that report `error` to a client."""
    status, body = openai.describe(error)
    openai_error = body.error
    message = (
        openai_error.message
        if openai_error.param is None or openai_error.param in openai_error.message
        else f"{openai_error.param}: {openai_error.message}"
    )
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = AnthropicErrorDetails(error_code=NO_THREADS) if openai_error.code == NO_THREADS else None
    shape = AnthropicErrorResponse(
        error=AnthropicError(type=kind, message=message, details=details), request_id=request_id
    )
    return status, shape.model_dump()


def encode(body: dict[str, Any]) -> bytes:
    """`body` as JSON. ASCII, because a message may quote what is not valid Unicode."""
    return json.dumps(body).encode()
