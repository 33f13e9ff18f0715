"""The endpoint-picker protocol 1.0 for one HTTP request: decodes the proxy's messages and encodes the responses.

    https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004

The protocol is based on Envoy's external processing. A proxy sends the body in one of two modes, and names the mode in
its first message:

    BUFFERED               headers ──►             FULL_DUPLEX_STREAMED   headers ──►
                           ◄── continue                                   chunk ──►  …  last chunk, or trailers ──►
                           whole body ──►                                 ◄── headers and destination
                           ◄── destination                                ◄── chunk …: the same body

The destination is sent twice with the same value, as a header and as metadata. This module does no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.type.v3 import http_status_pb2

from stoker_gateway.ext_proc.answers import LocalReply
from stoker_gateway.protocol.envoy_headers import (
    CLUSTER,
    DESTINATION,
    DESTINATION_METADATA,
    METADATA,
    PICKER_DETAILS,
    RESPONSE_ID_HEADER,
    SUBSET_METADATA,
)

_SUBSET: Final = "x-gateway-destination-endpoint-subset"

#: Maximum size in bytes of a body chunk that is sent back, so that its message is less than 64 KiB.
CHUNK_BYTES: Final = 63 * 1024

_BODY_MODE = processing_mode_pb2.ProcessingMode
_OVERWRITE: Final = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_CONTINUE: Final = ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())
_CONTINUE_TRAILERS: Final = ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())


class ProtocolError(Exception):
    """The proxy violates the protocol, or its configuration is unsuitable."""


class Progress(enum.Enum):
    """State of the request after a message."""

    MORE = "more"
    """More of the request follows."""
    HEADERS = "headers"
    """The headers have arrived, and a body follows."""
    COMPLETE = "complete"
    """The whole request has arrived."""
    TOO_LARGE = "too large"
    """The body exceeds the maximum size."""


@dataclass(frozen=True, slots=True)
class Route:
    """Destination of a request.

    Attributes:
        cluster: Envoy cluster of the model's servers.
        servers: ``IP:PORT``, the best first; any others are for the retry.
        headers: request headers that replace the client's, with names in lower case. Their values may be secret.
        without: request headers to remove.
        metadata: dynamic metadata: fields for the access log of completed requests, and values of response headers.
        response_id: id under which the server stores its response; None means that no id is sent.
    """

    cluster: str
    servers: tuple[str, ...]
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    without: tuple[str, ...] = ()
    metadata: Mapping[str, str | int] = field(default_factory=dict)
    response_id: str | None = None


class Exchange:
    """Message exchange about one request.

    Args:
        max_body_bytes: maximum size of a body.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._began = False
        self._streamed = False
        self._complete_at = ""
        self._chunks: list[bytes] = []
        self._size = 0
        self._headers: dict[str, bytes] = {}
        #: Servers to which the request may be sent; None means all.
        self.subset: frozenset[str] | None = None

    def header(self, name: str) -> str:
        """Return the value of a request header by its name in lower case: the last one if it occurs several times,
        empty if it is absent."""
        return self._headers.get(name, b"").decode("utf-8", "replace")

    @property
    def body(self) -> bytes:
        """The part of the request's body that has arrived."""
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""

    def receive(self, message: ext_proc.ProcessingRequest) -> Progress:
        """Process the proxy's next message.

        Raises:
            ProtocolError: the message is not allowed at this point, or shows an unsuitable configuration.
        """
        kind = message.WhichOneof("request")
        if self._complete_at:
            raise ProtocolError("a message came after the end of the request")
        if kind == "request_headers" and not self._began:
            return self._receive_headers(message)
        if kind == "request_body" and self._began:
            return self._receive_body(message.request_body)
        if kind == "request_trailers" and self._began:
            self._complete_at = kind
            return Progress.COMPLETE
        raise ProtocolError(f"{kind or 'an empty message'} is not allowed {'here' if self._began else 'first'}")

    def go_on(self) -> ext_proc.ProcessingResponse | None:
        """Return the message that makes the proxy send the body; None if the proxy sends it without a message."""
        return None if self._streamed else _CONTINUE

    def route(self, route: Route) -> Iterator[ext_proc.ProcessingResponse]:
        """Yield the messages that send the complete request to its destination."""
        if self._complete_at == "request_headers" or self._streamed:
            yield _route_message("request_headers", route)
            if self._complete_at != "request_headers":
                yield from self._body_chunks()
        elif self._complete_at == "request_body":
            yield _route_message("request_body", route)
        else:
            raise ProtocolError("trailers came without a body")

    def extend(self, seconds: float) -> ext_proc.ProcessingResponse:
        """Return the message that sets the proxy's timeout for the decision to `seconds` from now. The proxy accepts
        only one such message while it waits for a response."""
        response = ext_proc.ProcessingResponse()
        response.override_message_timeout.FromMilliseconds(round(seconds * 1000))
        return response

    def reply(self, reply: LocalReply) -> ext_proc.ProcessingResponse:
        """Return the message that makes the proxy send a local reply."""
        return ext_proc.ProcessingResponse(
            immediate_response=ext_proc.ImmediateResponse(
                details=PICKER_DETAILS,
                status=http_status_pb2.HttpStatus(code=reply.status),
                headers=ext_proc.HeaderMutation(set_headers=[_header(*each) for each in reply.headers]),
                body=reply.body,
            )
        )

    def _receive_headers(self, message: ext_proc.ProcessingRequest) -> Progress:
        self._began = True
        if message.observability_mode:
            raise ProtocolError("observability_mode makes the proxy ignore the picker's decisions; disable it")
        self._headers = {
            each.key: each.raw_value or each.value.encode() for each in message.request_headers.headers.headers
        }
        self.subset = _subset(message)
        if message.request_headers.end_of_stream:
            self._complete_at = "request_headers"
            return Progress.COMPLETE
        # A proxy that does not name the mode is older than FULL_DUPLEX_STREAMED.
        mode = message.protocol_config.request_body_mode if message.HasField("protocol_config") else _BODY_MODE.BUFFERED
        if mode not in (_BODY_MODE.BUFFERED, _BODY_MODE.FULL_DUPLEX_STREAMED):
            raise ProtocolError("request_body_mode must be BUFFERED or FULL_DUPLEX_STREAMED: the body names the model")
        self._streamed = mode == _BODY_MODE.FULL_DUPLEX_STREAMED
        declared = self.header("content-length")
        if declared.isascii() and declared.isdecimal() and int(declared[:20]) > self._max_body_bytes:
            return Progress.TOO_LARGE
        return Progress.HEADERS

    def _receive_body(self, body: ext_proc.HttpBody) -> Progress:
        chunk = body.body
        self._size += len(chunk)
        if self._size > self._max_body_bytes:
            return Progress.TOO_LARGE
        if chunk:
            self._chunks.append(chunk)
        # A buffered body is complete even if trailers follow.
        if body.end_of_stream or body.end_of_stream_without_message or not self._streamed:
            self._complete_at = "request_body"
            return Progress.COMPLETE
        return Progress.MORE

    def _body_chunks(self) -> Iterator[ext_proc.ProcessingResponse]:
        ends = self._complete_at == "request_body"
        body = memoryview(self.body)
        for start in range(0, max(1 if ends else 0, len(body)), CHUNK_BYTES):
            chunk = ext_proc.StreamedBodyResponse(
                body=bytes(body[start : start + CHUNK_BYTES]), end_of_stream=ends and start + CHUNK_BYTES >= len(body)
            )
            mutation = ext_proc.BodyMutation(streamed_response=chunk)
            yield ext_proc.ProcessingResponse(
                request_body=ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))
            )
        if not ends:
            yield _CONTINUE_TRAILERS


def _route_message(part: Literal["request_headers", "request_body"], route: Route) -> ext_proc.ProcessingResponse:
    response = ext_proc.ProcessingResponse()
    response.CopyFrom(_cached_route(part, route.cluster, route.servers, route.headers, route.without))
    if route.response_id is not None:  # unique for each request, so it is not part of the cached message
        mutation = getattr(response, part).response.header_mutation
        mutation.set_headers.append(_header(RESPONSE_ID_HEADER, route.response_id))
    if route.metadata:
        response.dynamic_metadata.update({METADATA: route.metadata})
    return response


@lru_cache(maxsize=4096)
def _cached_route(
    part: Literal["request_headers", "request_body"],
    cluster: str,
    servers: tuple[str, ...],
    headers: tuple[tuple[str, str], ...],
    without: tuple[str, ...],
) -> ext_proc.ProcessingResponse:
    # A single server is named twice: the retry uses another connection, since the first may have died while idle.
    destination = ",".join(servers if len(servers) > 1 else servers * 2)
    common = ext_proc.CommonResponse(
        header_mutation=ext_proc.HeaderMutation(
            set_headers=[
                _header(DESTINATION, destination),
                _header(CLUSTER, cluster),
                *(_header(*each) for each in headers),
            ],
            remove_headers=without,
        ),
        clear_route_cache=True,
    )
    response = ext_proc.ProcessingResponse()
    response.dynamic_metadata.update({DESTINATION_METADATA: {DESTINATION: destination}})
    getattr(response, part).response.CopyFrom(common)
    return response


def _header(name: str, value: str) -> Any:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
    )


def _subset(message: ext_proc.ProcessingRequest) -> frozenset[str] | None:
    spaces = message.metadata_context.filter_metadata
    if SUBSET_METADATA not in spaces:  # indexing a protobuf map would add the key
        return None
    fields = spaces[SUBSET_METADATA].fields
    if _SUBSET not in fields:
        return None
    # A value that is not a list of addresses allows no server.
    return frozenset(each.string_value for each in fields[_SUBSET].list_value.values if each.string_value)
