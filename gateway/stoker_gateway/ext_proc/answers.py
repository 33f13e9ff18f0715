"""HTTP responses of the picker itself: errors, in the requested API's format, and the models."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.errors import RequestError
from stoker_gateway.ext_proc.errors import HeldError, MethodError, RateLimitError, RetryableError, StartError
from stoker_gateway.ext_proc.model_cards import ModelCards
from stoker_gateway.keys.errors import UnauthorizedError
from stoker_gateway.protocol.envoy_headers import HELD_HEADER
from stoker_gateway.registry.model_registry import Endpoint

#: Request ids that Stoker's engine accepts.
REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
#: HTTP status → Anthropic's error type.
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class LocalReply:
    """An HTTP response of the picker itself.

    Attributes:
        headers: names and values, without Content-Length, which the proxy adds.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def error_reply(error: RequestError, path: str, request_id: str | None = None) -> LocalReply:
    """Return the response that reports `error`, in the format of the API at `path`.

    Args:
        request_id: value of the request's X-Request-Id header; ignored unless it is a valid id.
    """
    request_id = request_id if request_id is not None and REQUEST_ID.fullmatch(request_id) else None
    headers = [] if request_id is None else [("x-request-id", request_id)]
    if isinstance(error, RetryableError):
        headers.append(_retry_after(error.retry_after_s))
    if isinstance(error, StartError):
        headers.append(("x-should-retry", "false"))
    if isinstance(error, HeldError | StartError) and error.held_s is not None:
        headers.append((HELD_HEADER, f"{error.held_s:.3f}"))
    if isinstance(error, RateLimitError):
        retry_after_s = error.denial.retry_after_s
        # OpenAI's clients obey x-should-retry: without a time after which a retry can succeed, they must not retry.
        headers.append(("x-should-retry", "false") if retry_after_s is None else _retry_after(retry_after_s))
        headers.extend(error.denial.standing.headers().items())
    if isinstance(error, MethodError):
        headers.append(("allow", error.allowed))
    if isinstance(error, UnauthorizedError):
        headers.append(("www-authenticate", "Bearer"))
    if _is_anthropic(path):
        if request_id is not None:
            headers.append(("request-id", request_id))
        return _json(error.status, _anthropic(error, request_id), headers)
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return _json(error.status, {"error": fields}, headers)


def models_reply(endpoints: Iterable[Endpoint], cards: ModelCards) -> LocalReply:
    """Return the response of ``/v1/models``, in OpenAI's format."""
    return _json(200, {"object": "list", "data": [_card(each, cards) for each in endpoints]})


def model_reply(endpoint: Endpoint, cards: ModelCards) -> LocalReply:
    """Return the response of ``/v1/models/{name}``."""
    return _json(200, _card(endpoint, cards))


def _card(endpoint: Endpoint, cards: ModelCards) -> dict[str, Any]:
    card = {"id": endpoint.name, "object": "model", "created": endpoint.created, "owned_by": "stoker"}
    return card | cards.of(endpoint.name, endpoint.servers)


def _retry_after(seconds: float) -> tuple[str, str]:
    return "retry-after", str(max(1, math.ceil(seconds)))


def _is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def _anthropic(error: RequestError, request_id: str | None) -> dict[str, Any]:
    """Return the body of an error (https://docs.anthropic.com/en/api/errors). The format has no field for `param`, so
    the message includes it."""
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _json(status: int, body: dict[str, Any], headers: Iterable[tuple[str, str]] = ()) -> LocalReply:
    """Return a response with a JSON body in ASCII, because messages may quote any text of the client."""
    return LocalReply(status, (("content-type", "application/json"), *headers), json.dumps(body).encode())
