"""Errors in Anthropic's format: ``{"type": "error", "error": {"type", "message"}, "request_id"}``.

https://docs.anthropic.com/en/api/errors. The format has no field for the invalid parameter, so the message names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel

from stoker_engine.server.errors.description import ErrorDescription
from stoker_engine.server.fields.field_types import Extra
from stoker_engine.server.paths import route_path

#: Response header with the request's id.
HEADER: Final = "request-id"

#: Anthropic's error types by HTTP status. For overloaded_error Anthropic uses 529; this server uses HTTP's 503.
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


#: Error code that makes clients send whole conversations.
NO_THREADS: Final = "thread_unsupported_request"


class AnthropicErrorDetails(BaseModel):
    """An error code that clients act on."""

    error_code: str


class AnthropicError(BaseModel):
    """An error: `type` for programs, `message` for people."""

    type: str
    message: str
    details: Extra[AnthropicErrorDetails] = None


class AnthropicErrorResponse(BaseModel):
    """Body of every response with a status from 400 on, and of the `error` event of a failed stream."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str | None = None


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether a request is for this API, and gets its error format."""
    path = route_path(scope)
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def encode(error: ErrorDescription, request_id: str | None) -> bytes:
    """Return the body that reports `error`. ASCII only, because a message may quote text that is not valid Unicode."""
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
