"""A completed request, from an entry of Envoy's access log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from envoy.config.core.v3 import base_pb2

from stoker_gateway.protocol.envoy_headers import (
    DESTINATION,
    DESTINATION_METADATA,
    ESTIMATE,
    FAILED,
    GRANT,
    KEY,
    METADATA,
    MODEL,
    PICK,
    USAGE_METADATA,
)
from stoker_gateway.protocol.paths import FORMS, GENERATING, POSTED
from stoker_gateway.usage import tokens
from stoker_gateway.usage.tokens import Tokens

_POST: Final = base_pb2.RequestMethod.POST
#: Envoy's response flags of incomplete responses: the client or the server closed the connection, or the response timed
#: out or was invalid.
_BROKEN_OFF: Final = (
    "downstream_connection_termination",
    "downstream_remote_reset",
    "upstream_connection_termination",
    "upstream_remote_reset",
    "local_reset",
    "stream_idle_timeout",
    "upstream_protocol_error",
)


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """A request that was routed and has ended.

    Attributes:
        model: served name.
        key: id of the client's key; empty if requests need no key.
        grant: id of the reservation against the key's limits; empty without a reservation.
        pick: number of the picker's decision that routed it.
        servers: servers that Envoy tried, in order. Only the last can have sent the response.
        unreachable: whether the connection to the last server failed.
        status: HTTP status of the response; 0 if there was none.
        response_bytes: size of the response's body.
        aborted: whether the response is incomplete, whatever the cause.
        began: start time in seconds since 1970.
        request_id: value of X-Request-Id.
    """

    model: str
    key: str
    grant: str
    pick: int
    servers: tuple[str, ...]
    unreachable: bool
    status: int
    tokens: Tokens
    response_bytes: int
    aborted: bool
    began: float
    duration_s: float
    request_id: str

    @classmethod
    def of(cls, entry: Any) -> CompletedRequest | None:
        """Return the request of an access log entry (`HTTPAccessLogEntry`); None if it was not routed."""
        common, response = entry.common_properties, entry.response
        spaces = common.metadata.filter_metadata
        picker_fields = _fields(spaces, METADATA)
        if not isinstance(number := picker_fields.get(PICK), float):
            return None
        status, flags = response.response_code.value, common.response_flags
        aborted = any(getattr(flags, name) for name in _BROKEN_OFF)
        return cls(
            model=str(picker_fields.get(MODEL, "")),
            key=str(picker_fields.get(KEY, "")),
            grant=str(picker_fields.get(GRANT, "")),
            pick=int(number),
            servers=_servers(common, _fields(spaces, DESTINATION_METADATA)),
            unreachable=flags.upstream_connection_failure,
            status=status,
            tokens=_tokens(entry, _fields(spaces, USAGE_METADATA), picker_fields.get(ESTIMATE), aborted=aborted),
            response_bytes=response.response_body_bytes,
            aborted=aborted,
            began=common.start_time.ToMicroseconds() / 1e6,
            duration_s=common.duration.ToMicroseconds() / 1e6,
            request_id=entry.request.request_id,
        )


def _fields(spaces: Any, name: str) -> dict[str, Any]:
    """Return the fields of a metadata namespace that are numbers or text."""
    if name not in spaces:  # indexing a protobuf map would add the key
        return {}
    fields = spaces[name].fields
    kinds = {key: value.WhichOneof("kind") for key, value in fields.items()}
    return {key: getattr(fields[key], kind) for key, kind in kinds.items() if kind in ("number_value", "string_value")}


def _servers(common: Any, destination: Mapping[str, Any]) -> tuple[str, ...]:
    picked = tuple(filter(None, str(destination.get(DESTINATION, "")).split(",")))
    tried = picked[: max(1, common.upstream_request_attempt_count)]
    address = common.upstream_remote_address.socket_address
    if not address.address:
        return tried
    host = f"[{address.address}]" if ":" in address.address else address.address
    return (*tried[:-1], f"{host}:{address.port_value}")


def _tokens(entry: Any, usage: Mapping[str, Any], prompt_tokens: Any, *, aborted: bool) -> Tokens:
    """Return the tokens that a request used: from the response's usage, or estimated."""
    path = entry.request.path.partition("?")[0]
    if entry.request.request_method != _POST or path not in POSTED:
        return Tokens()  # a retrieved stored response repeats the usage of the original request
    known = tokens.reported(usage)
    if known is not None and (not aborted or "stoker_usage" in usage):
        return known
    status = entry.response.response_code.value
    if usage.get(FAILED) or path not in GENERATING | FORMS or not (status == 200 or (aborted and not status)):
        return known or Tokens()
    streamed = entry.response.response_headers.get("content-type", "").startswith("text/event-stream")
    guess = tokens.estimated(entry.request.request_body_bytes, entry.response.response_body_bytes, streamed=streamed)
    if known is not None:  # the response is incomplete, and its usage may cover only its beginning
        return Tokens(known.prompt, known.cached, max(known.output, guess.output), estimated=True)
    prompt = int(prompt_tokens) if isinstance(prompt_tokens, float) else guess.prompt
    return Tokens(prompt, 0, guess.output, estimated=True)
