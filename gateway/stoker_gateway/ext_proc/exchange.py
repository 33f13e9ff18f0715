"""The endpoint-picker protocol 1.0, for one HTTP request: what the proxy says, and what it is answered.

    https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004

It rides on Envoy's external processing. A proxy sends a request's body in one of two ways, and says which at first:

    BUFFERED               headers ──►             FULL_DUPLEX_STREAMED   headers ──►
                           ◄── go on                                      chunk ──►  …  last chunk, or trailers ──►
                           whole body ──►                                 ◄── headers, and where to
                           ◄── where to                                   ◄── chunk …, which is the body again

Where to is said twice, by a header and by metadata, in the same words. Nothing here waits or knows a socket.
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

#: Bytes of a chunk of a body that is sent back: a message of it is less than 64 KiB.
CHUNK_BYTES: Final = 63 * 1024

_BODY_MODE = processing_mode_pb2.ProcessingMode
_OVERWRITE: Final = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_GO_ON: Final = ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())
_GO_ON_TRAILERS: Final = ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())


class ProtocolError(Exception):
    """The proxy says what the protocol does not have here, or is set up to say too little."""


class Progress(enum.Enum):
    """What came of a message."""

    MORE = "more"
    """There is more to come."""
    HEADERS = "headers"
    """The headers are there; if they do not settle it, there is more to come."""
    COMPLETE = "complete"
    """All of the request is there."""
    TOO_LARGE = "too large"
    """The body is larger than what is taken."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        cluster: the proxy's name for the servers of its model.
        servers: ``IP:PORT``, best first; the others are for another try.
        headers: of the request that are set, by name in lower case, in place of the client's. They may be secret.
        without: headers that are removed.
        metadata: what the proxy's log of ended requests says of it, and headers of the answer
            (`limits/ratelimit_headers.py`).
        response_id: what the server is to call the response that it makes and keeps; None: it keeps none.
    """

    cluster: str
    servers: tuple[str, ...]
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    without: tuple[str, ...] = ()
    metadata: Mapping[str, str | int] = field(default_factory=dict)
    response_id: str | None = None


class Exchange:
    """What is said about one request.

    Args:
        max_body_bytes: of a body.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._began = False
        self._streamed = False
        self._complete_at = ""
        self._chunks: list[bytes] = []
        self._size = 0
        self._headers: dict[str, bytes] = {}
        #: The only servers that it may go to; None stands for all.
        self.subset: frozenset[str] | None = None

    def header(self, name: str) -> str:
        """What the request's header `name`, in lower case, says: the last, if there are several; empty without one."""
        return self._headers.get(name, b"").decode("utf-8", "replace")

    @property
    def body(self) -> bytes:
        """What there is of the request's body."""
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""

    def receive(self, message: ext_proc.ProcessingRequest) -> Progress:
        """Takes in what the proxy says next.

        Raises:
            ProtocolError: it cannot say that here.
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
        """What makes the proxy send the body, after the headers."""
        return None if self._streamed else _GO_ON

    def route(self, route: Route) -> Iterator[ext_proc.ProcessingResponse]:
        """What sends the request, once complete, where it goes."""
        if self._complete_at == "request_headers" or self._streamed:
            yield _routed("request_headers", route)
            if self._complete_at != "request_headers":
                yield from self._body_again()
        elif self._complete_at == "request_body":
            yield _routed("request_body", route)
        else:
            raise ProtocolError("trailers came without a body")

    def extend(self, seconds: float) -> ext_proc.ProcessingResponse:
        """What makes the proxy wait for so long, from now on, for what `route` or `answer` says. It obeys once."""
        response = ext_proc.ProcessingResponse()
        response.override_message_timeout.FromMilliseconds(round(seconds * 1000))
        return response

    def answer(self, answer: LocalReply) -> ext_proc.ProcessingResponse:
        """What answers the request in the servers' stead."""
        return ext_proc.ProcessingResponse(
            immediate_response=ext_proc.ImmediateResponse(
                details=PICKER_DETAILS,
                status=http_status_pb2.HttpStatus(code=answer.status),
                headers=ext_proc.HeaderMutation(set_headers=[_header(*each) for each in answer.headers]),
                body=answer.body,
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
        # A proxy that does not say how it sends bodies is older than the newer of the two ways.
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
        # A buffered body is whole, also where trailers follow it.
        if body.end_of_stream or body.end_of_stream_without_message or not self._streamed:
            self._complete_at = "request_body"
            return Progress.COMPLETE
        return Progress.MORE

    def _body_again(self) -> Iterator[ext_proc.ProcessingResponse]:
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
            yield _GO_ON_TRAILERS


def _routed(part: Literal["request_headers", "request_body"], route: Route) -> ext_proc.ProcessingResponse:
    response = ext_proc.ProcessingResponse()
    response.CopyFrom(_sent_on(part, route.cluster, route.servers, route.headers, route.without))
    if route.response_id is not None:  # it is another one each time, so it is not in what is kept
        mutation = getattr(response, part).response.header_mutation
        mutation.set_headers.append(_header(RESPONSE_ID_HEADER, route.response_id))
    if route.metadata:
        response.dynamic_metadata.update({METADATA: route.metadata})
    return response


@lru_cache(maxsize=4096)
def _sent_on(
    part: Literal["request_headers", "request_body"],
    cluster: str,
    servers: tuple[str, ...],
    headers: tuple[tuple[str, str], ...],
    without: tuple[str, ...],
) -> ext_proc.ProcessingResponse:
    # The only one is tried again, by another connection: the first may have died while it was idle.
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
    if SUBSET_METADATA not in spaces:  # indexing would add it
        return None
    fields = spaces[SUBSET_METADATA].fields
    if _SUBSET not in fields:
        return None
    # What is no list of addresses allows none.
    return frozenset(each.string_value for each in fields[_SUBSET].list_value.values if each.string_value)
