"""Errors in Anthropic's shape: ``{"type": "error", "error": {"type", "message"}, "request_id"}``.

https://docs.anthropic.com/en/api/errors. There is no field for what is wrong with the request, so the message names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel

from stoker_engine.server.errors.description import ErrorDescription
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


def encode(error: ErrorDescription, request_id: str | None) -> bytes:
    """The body that reports `error`. ASCII, because a message may quote what is not valid Unicode."""
    names_field = error.param is None or error.param in error.message
    shape = AnthropicErrorResponse(
        error=AnthropicError(
            type=_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error"),
            message=error.message if names_field else f"{error.param}: {error.message}",
            details=AnthropicErrorDetails(error_code=NO_THREADS) if error.code == NO_THREADS else None,
        ),
        request_id=request_id,
    )
    return json.dumps(shape.model_dump()).encode()
