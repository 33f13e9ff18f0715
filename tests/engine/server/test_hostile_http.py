"""Edge cases of HTTP and JSON: each request gets the right response, or a 4xx in OpenAI's format.

The engine is faked, sockets are real. Each row contains the expected status of the last response.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from .conftest import FakeEngine, MakeClient, Serving, serving_fake, wait_until

BODY = b'{"prompt": "a"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
LAST = b"Connection: close\r\n"


def _json(body: bytes) -> bytes:
    return POST + LAST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _field(name: str, value: bytes) -> bytes:
    return _json(b'{"prompt": "a", "%s": %s}' % (name.encode(), value))


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving_fake(FakeEngine(), shutdown_grace=0, request_body_timeout=0.3, max_request_bytes=10**6) as server:
        wait_until(lambda: server.service.is_loaded)
        yield server


def _talk(server: Serving, raw: bytes) -> bytes:
    """Return all responses until the server closes the connection."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0), timeout=60) as connection:
        connection.sendall(raw)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


FRAMING = {
    "one length twice": (POST + LAST + b"Content-Length: 15\r\nContent-Length: 15\r\n\r\n" + BODY, 200),
    "two lengths": (POST + b"Content-Length: 15\r\nContent-Length: 16\r\n\r\n" + BODY, 400),
    "a signed length": (POST + b"Content-Length: +15\r\n\r\n" + BODY, 400),
    "a length of 20 digits": (POST + LAST + b"Content-Length: " + b"9" * 20 + b"\r\n\r\n", 413),
    "a length of 5000 digits": (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "a length in other digits": (POST + "Content-Length: ١٥\r\n\r\n".encode() + BODY, 400),
    "two codings": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "no coding": (POST + b"Transfer-Encoding: identity\r\n\r\n" + BODY, 400),
    "chunks with extensions": (CHUNKED + b'f;a=b;c="d"\r\n' + BODY + b"\r\n0\r\n\r\n", 200),
    "a chunk's endless extension": (CHUNKED + b"f;a=" + b"b" * 5 * 2**20, 400),
    "a chunk of 2^64 bytes": (CHUNKED + b"f" * 16 + b"\r\n" + BODY, 408),
    "a chunk of 2^64 bytes, some sent": (CHUNKED + b"f" * 16 + b"\r\n" + b"a" * (10**6 + 1), 413),
    "a size of 21 digits": (CHUNKED + b"f" * 21 + b"\r\n" + BODY, 400),
    "a size below zero": (CHUNKED + b"-1\r\n" + BODY, 400),
    "a chunk longer than its size": (CHUNKED + b"f\r\n" + BODY + b"XX0\r\n\r\n", 400),
    "lines ended by LF alone": (CHUNKED + b"f\n" + BODY + b"\n0\n\n", 408),
    "trailers": (CHUNKED + b"f\r\n" + BODY + b"\r\n0\r\nX: y\r\nContent-Length: 5\r\n\r\n", 200),
    "a bad trailer": (CHUNKED + b"f\r\n" + BODY + b"\r\n0\r\nbad trailer\r\n\r\n", 400),
    "100-continue": (POST + LAST + b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n" + BODY, 200),
    "100-continue, too large": (POST + LAST + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n", 413),
    "100-continue, then no chunk": (CHUNKED[:-2] + b"Expect: 100-continue\r\n\r\nZZ\r\n", 400),
    "an unknown expectation": (POST + LAST + b"Expect: 200-maybe\r\nContent-Length: 15\r\n\r\n" + BODY, 200),
    "a pipeline": (GET + b"\r\n" + GET + LAST + b"\r\n", 200),
    "a pipeline that ends in garbage": (GET + b"\r\nGARBAGE\r\n\r\n", 400),
    "a body that no handler reads": (GET + LAST + b"Content-Length: 5\r\n\r\nhello", 200),
    "a long query": (b"GET /version?" + b"a=b&" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n", 200),
    "a long path": (b"GET /" + b"a/" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n", 404),
    "a bad escape": (b"GET /v1/%zz HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n", 404),
    "an absolute target": (b"GET http://x/version HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n", 404),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n", 404),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /version\r\n\r\n", 400),
    "two hosts": (GET + b"Host: y\r\n\r\n", 400),
    "a space after a name": (GET + b"X : a\r\n\r\n", 400),
    "a NUL in a header": (GET + b"X: a\0b\r\n\r\n", 400),
    "bytes in a header": (GET + LAST + b"X: \xff\xfe\r\nX-Request-Id: \xff\r\n\r\n", 200),
    "h2c": (GET + b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n\r\n", 200),
}
JSON = {
    "UTF-16": (_json(BODY.decode().encode("utf-16")), 400),
    "a byte order mark": (_json(b"\xef\xbb\xbf" + BODY), 400),
    "no UTF-8": (_json(b'{"prompt": "\xff\xfe"}'), 400),
    "overlong UTF-8": (_json(b'{"prompt": "\xc0\xaf"}'), 400),
    "a surrogate in UTF-8": (_json(b'{"prompt": "\xed\xa0\x80"}'), 400),
    "a lone surrogate": (_json(b'{"prompt": "\\ud800"}'), 400),
    "a lone surrogate in a name": (_json(b'{"prompt": "a", "\\udc00": 1}'), 400),
    "a pair of surrogates": (_json(b'{"prompt": "\\ud83e\\udd8a"}'), 200),
    "deep arrays": (_json(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 400),
    "deep objects": (_field("metadata", b'{"a":' * 50_000 + b"1" + b"}" * 50_000), 400),
    "NaN": (_field("temperature", b"NaN"), 400),
    "Infinity": (_field("temperature", b"-Infinity"), 400),
    "1e999": (_field("temperature", b"1e999"), 400),
    "an infinite bias": (_field("logit_bias", b'{"5": -1e999}'), 400),
    "a number of 5000 digits": (_field("seed", b"9" * 5000), 400),
    "a fraction of 5000 digits": (_field("temperature", b"0." + b"1" * 5000), 200),
    "a name twice": (_json(b'{"prompt": "a", "max_tokens": 0, "max_tokens": 1}'), 200),
    "a NUL": (_json(b'{"prompt": "a\0"}'), 400),
    "more than one value": (_json(BODY + BODY), 400),
    "an empty body": (_json(b""), 400),
    "white space": (_json(b" \n\t"), 400),
    "null": (_json(b"null"), 400),
    "a comment": (_json(b'{"prompt": "a" /* x */}'), 400),
    "a header in an id": (_field("request_id", b'"a\\r\\nX: y"'), 400),
}


@pytest.mark.parametrize("name", [*FRAMING, *JSON])
def test_edge_cases_get_the_expected_status(server: Serving, name: str, caplog: pytest.LogCaptureFixture) -> None:
    raw, expected = {**FRAMING, **JSON}[name]
    with caplog.at_level(logging.ERROR):
        answers = re.split(rb"(?:^|(?<=[}\n]))HTTP/1\.1 ", _talk(server, raw))[1:]
    head, _, body = answers[-1].partition(b"\r\n\r\n")
    assert int(head.split()[0]) == expected, answers
    if expected >= 400:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert not caplog.records, "no error is logged"
    wait_until(lambda: server.service.lifecycle.in_flight == 0)


def test_bodies_of_one_connection_are_answered_in_order(server: Serving) -> None:
    """Even after a body that was refused before it was read."""
    fine = POST + b"Content-Length: 15\r\n\r\n" + BODY
    large = POST + b"Content-Length: 1000001\r\n\r\n" + b"a" * 1_000_001
    answers = _talk(server, fine + large + fine + _json(BODY))
    assert re.findall(rb"HTTP/1\.1 (\d+)", answers) == [b"200", b"413", b"200", b"200"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({f"k{i}": 1 for i in range(50_000)}, "k0"),
        ({"metadata": {f"k{i}": 5 for i in range(50_000)}}, "metadata"),
        ({"logit_bias": {f"k{i}": "x" for i in range(50_000)}}, "logit_bias"),
        ({"stream_options": {f"k{i}": 1 for i in range(50_000)}}, "stream_options.k0"),
    ],
)
def test_only_one_of_many_invalid_fields_is_described(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], param: str
) -> None:
    """The check runs in the event loop, and delays other requests."""
    from stoker_engine.server.errors import description

    counted: list[int] = []
    invalid = description._invalid
    monkeypatch.setattr(description, "_invalid", lambda found: (counted.append(len(found)), invalid(found))[1])
    client: TestClient = make_client()
    answer = client.post("/v1/completions", json={"prompt": "a", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert counted == [1]
