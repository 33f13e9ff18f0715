"""Seeded raw HTTP requests, most of them invalid in one or more ways."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .behind_envoy import CHAT

_METHODS = ("POST", "GET", "PUT", "HEAD", "OPTIONS", "TRACE", "CONNECT", "post", "PRI", "P\x00ST", "X" * 300, "")
_PATHS = (
    CHAT,
    "/v1/../metrics",
    "/v1/%2e%2e/metrics",
    "/v1/..%2fmetrics",
    "/v1/..%5cmetrics",
    "/v1/%252e%252e/metrics",
    "/v1/./..//metrics",
    "//metrics",
    "/metrics",
    "/v1/x;/../../metrics",
    "/v1/x/..;/metrics",
    "/v1/%00",
    "/v1/%zz",
    "/v1/x#/../../metrics",
    "/v1/x?/../../metrics",
    "http://elsewhere/v1/models",
    "http://elsewhere/metrics",
    "elsewhere:443",
    "*",
    "",
    "v1/models",
    "/v1\\..\\metrics",
    "/v1/\u00e9",
    "/v1/" + "x" * 40_000,
)
_VERSIONS = ("HTTP/1.1",) * 6 + ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "http/1.1", "")
_FIELDS = (
    b"content-length: 2",
    b"content-length: 2, 2",
    b"content-length: 2\r\ncontent-length: 3",
    b"content-length: -1",
    b"content-length: +2",
    b"content-length: 0x2",
    b"content-length: 99999999999999999999",
    b"content-length : 2",
    b"transfer-encoding: chunked",
    b"transfer-encoding: chunked, chunked",
    b"transfer-encoding: identity, chunked",
    b"transfer-encoding: xchunked",
    b"transfer-encoding:\x0bchunked",
    b"transfer-encoding : chunked",
    b"Transfer-Encoding: gzip",
    b"x: 1\r\n folded: 2",
    b"x: 1\n\nGET /metrics HTTP/1.1",
    b"x: 1\rtransfer-encoding: chunked",
    b"x: \x00",
    b"x: \xff\xfe",
    b"x\x00: 1",
    b": 1",
    b"nothing",
    b"x: " + b"y" * 40_000,
    b"\r\n".join(b"x%d: 1" % number for number in range(120)),
    b"host: other",
    b"connection: x-request-id, upgrade, x-stoker-cluster",
    b"upgrade: websocket\r\nconnection: upgrade",
    b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"expect: 100-continue",
    b"expect: 200-ok",
    b"te: trailers",
    b"trailer: host",
    b"x-stoker-cluster: cluster-m",
    b"X-Gateway-Destination-Endpoint: 127.0.0.1:1",
    b"x_gateway_destination_endpoint: 127.0.0.1:1",
    b"x-envoy-original-path: /metrics",
    b"x-envoy-retry-on: 5xx\r\nx-envoy-max-retries: 9",
    b"x-envoy-upstream-rq-timeout-ms: 1",
    b"x-http-method-override: GET",
    b"x-original-url: /metrics\r\nx-rewrite-url: /metrics",
    b"grpc-timeout: 1n\r\ncontent-type: application/grpc",
)
_BODIES = (
    b"{}",
    b"",
    b"2\r\n{}\r\n0\r\n\r\n",
    b"2\n{}\n0\n\n",
    b"2;x=y\r\n{}\r\n0\r\nhost: z\r\n\r\n",
    b"ffffffffffffffff\r\n{}",
    b"-2\r\n{}\r\n0\r\n\r\n",
    b"0x2\r\n{}\r\n0\r\n\r\n",
    b"2\r\n{}0\r\n\r\n",
    b"3\r\n{}\r\n0\r\n\r\n",
    b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
    b"2\r\n{}\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
    b"{}GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
)


def requests(number: int, seed: int) -> Iterator[bytes]:
    """Yield `number` requests, each of which makes the server close its connection."""
    draw = random.Random(seed)
    for _ in range(number):
        method = draw.choice(_METHODS) if draw.random() < 0.3 else "POST"
        path = draw.choice(_PATHS) if draw.random() < 0.4 else CHAT
        line = f"{method} {path} {draw.choice(_VERSIONS) if draw.random() < 0.3 else 'HTTP/1.1'}".encode()
        fields = [b"host: x"] * (draw.random() < 0.9) + [b"connection: close"]
        fields += draw.sample(_FIELDS, draw.choice((1, 1, 2, 3)))
        draw.shuffle(fields)
        end = draw.choice((b"\r\n",) * 8 + (b"\n", b"\r"))
        text = bytearray(end.join((line, *fields, b"", draw.choice(_BODIES))))
        for _ in range(draw.choice((0, 0, 0, 1, 3))):
            text[draw.randrange(len(text))] = draw.randrange(256)
        yield bytes(text)
