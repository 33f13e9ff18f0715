"""Envoy's own error responses, in the format of the requested API: OpenAI's, or Anthropic's for /v1/messages and below.

The picker's responses are local replies too. `PICKER_DETAILS` marks them, and they stay unchanged.
"""

from __future__ import annotations

import json
from typing import Final

from stoker_gateway.envoy.values import Config
from stoker_gateway.protocol.envoy_headers import PICKER_DETAILS
from stoker_gateway.protocol.paths import NOT_SERVED

#: ``Retry-After`` of responses with a status in `_RETRYABLE`, in seconds.
RETRY_AFTER_S: Final = 1

_UNAVAILABLE: Final = "service_unavailable_error"
_INVALID: Final = "invalid_request_error"

#: HTTP status → message, and OpenAI's and Anthropic's error type.
_ERRORS: Final = {
    400: ("the request is not valid HTTP, or its path is invalid", _INVALID, _INVALID),
    403: ("the connection cannot be upgraded; send plain HTTP requests", _INVALID, _INVALID),
    404: (NOT_SERVED, "not_found_error", "not_found_error"),
    408: ("the request was not received in time, or the stream was idle for too long", _INVALID, _INVALID),
    413: ("the request body is too large", _INVALID, "request_too_large"),
    426: ("this version of HTTP is not supported", _INVALID, _INVALID),
    431: ("the request headers are too large", _INVALID, _INVALID),
    500: ("the gateway could not handle the request", "api_error", "api_error"),
    502: ("the server's response is not valid HTTP", "api_error", "api_error"),
    503: ("no server could answer; please try again", _UNAVAILABLE, "overloaded_error"),
    504: ("the server did not answer in time", _UNAVAILABLE, "overloaded_error"),
}

#: Statuses that clients should retry.
_RETRYABLE: Final = (503, 504)


def openai_error(status: int) -> Config:
    """Return an error in OpenAI's format."""
    message, kind, _ = _ERRORS[status]
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def anthropic_error(status: int) -> Config:
    """Return an error in Anthropic's format."""
    message, _, kind = _ERRORS[status]
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "%REQ(X-REQUEST-ID)%"}


def config() -> Config:
    """Return Envoy's ``local_reply_config``. The first mapper that matches applies."""
    mappers = [
        # Envoy answers an unknown transfer coding with 501.
        _mapper(400, anthropic_error(400), _status_filter(501), _is_anthropic()) | {"status_code": 400},
        _mapper(400, openai_error(400), _status_filter(501)) | {"status_code": 400},
    ]
    # Envoy rejects upgrades, such as WebSocket, with 403. The mapper replaces this status by 426, after which some
    # clients fall back to plain HTTP.
    for shape, *of in ((anthropic_error, _is_anthropic()), (openai_error,)):
        mappers.append(_mapper(403, shape(403), _status_filter(403), *of) | {"status_code": 426})
    for status in sorted(_ERRORS.keys() - {403}):
        mappers.append(_mapper(status, anthropic_error(status), _status_filter(status), _is_anthropic()))
        mappers.append(_mapper(status, openai_error(status), _status_filter(status)))
    return {"mappers": mappers}


def _mapper(status: int, body: Config, *of: Config) -> Config:
    # Envoy's JSON format omits null fields, so the format is text that contains JSON.
    text = json.dumps(body) + "\n"
    mapper: Config = {
        "filter": {"and_filter": {"filters": [_not_from_picker(), *of]}},
        "body_format_override": {"text_format_source": {"inline_string": text}, "content_type": "application/json"},
    }
    if status in _RETRYABLE:
        header = {"key": "retry-after", "value": str(RETRY_AFTER_S)}
        mapper["headers_to_add"] = [{"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    return mapper


def _status_filter(status: int) -> Config:
    value = {"default_value": status, "runtime_key": f"gateway.status_{status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}


def _not_from_picker() -> Config:
    return _cel_filter(f"!response.code_details.startsWith('{PICKER_DETAILS}')")


def _cel_filter(expression: str) -> Config:
    """Return a filter that matches if a CEL expression is true."""
    return {
        "extension_filter": {
            "name": "envoy.access_loggers.extension_filters.cel",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter",
                "expression": expression,
            },
        }
    }


def _is_anthropic() -> Config:
    path = {"safe_regex": {"regex": r"/v1/messages([/?].*)?"}}
    return {"header_filter": {"header": {"name": ":path", "string_match": path}}}
