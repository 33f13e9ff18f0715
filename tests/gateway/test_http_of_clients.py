"""Less common HTTP of clients: compressed bodies, HTTP/1.0, browsers, WebSockets, forms."""

from __future__ import annotations

import asyncio
import gzip
import json

import aiohttp
import pytest
from aiohttp import web

from .behind_envoy import CHAT, gateway
from .usage.answering import behind

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "é" * 3000}]}).encode()


def test_compressed_bodies_are_decoded_within_the_limit_or_refused() -> None:
    seen: list[tuple[bytes, str | None]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((await request.read(), request.headers.get("content-encoding")))
        return web.json_response({})

    async def main() -> None:
        async with behind(handler) as at, aiohttp.ClientSession() as client:

            async def post(data: bytes, coding: str) -> tuple[int, str]:
                headers = {"content-encoding": coding, "content-type": "application/json"}
                async with client.post(at.url + CHAT, data=data, headers=headers) as answer:
                    return answer.status, await answer.text()

            for coding in ("gzip", "identity"):
                status, text = await post(BODY if coding == "identity" else gzip.compress(BODY), coding)
                assert status == 200, (coding, text)
            assert all(body == BODY for body, _ in seen)
            assert {coding for _, coding in seen} <= {None, "identity"}
            for coding in ("zstd", "br", "x-gzip", "deflate", "gzip, zstd", "unknown"):
                status, text = await post(b"\x28\xb5\x2f\xfd", coding)
                assert (status, json.loads(text)["error"]["type"]) == (415, "invalid_request_error"), coding
                assert "Content-Encoding" in text
            for data in (b"no gzip", gzip.compress(BODY)[:50]):
                assert (await post(data, "gzip"))[0] == 400
            bomb = gzip.compress(b'{"model": "m", "prompt": "' + b" " * (64 << 20) + b'"}')
            assert (await post(bomb, "gzip"))[0] in (400, 413)
            assert len(seen) == 2

    asyncio.run(main())


def test_http_1_0_is_served() -> None:
    async def main() -> None:
        async with gateway(1) as at:
            for fields in (b"host: x\r\n", b""):
                head = b"POST %s HTTP/1.0\r\n%scontent-length: 2\r\n\r\n{}" % (CHAT.encode(), fields)
                answer = await at.raw(head)
                assert answer.split(b" ", 2)[1] == b"200" and answer.endswith(b'{"server": "a", "size": 2}')
            at.servers[0].does, at.servers[0].last = "stream", True
            answer = await at.raw(b"POST %s HTTP/1.0\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % CHAT.encode())
            assert answer.endswith(b"\r\n\r\ndata: [DONE]\n\n")  # without chunked encoding

    asyncio.run(main())


@pytest.mark.parametrize("origins", [("https://chat.example",), ("*",), ()])
def test_cors_headers_follow_the_allowed_origins(origins: tuple[str, ...]) -> None:
    async def main() -> None:
        async with gateway(1, allowed_origins=origins) as at, aiohttp.ClientSession() as client:
            for origin in ("https://chat.example", "https://elsewhere.example"):
                allowed = "*" in origins or origin in origins
                asks = {"origin": origin, "access-control-request-method": "POST"}
                asks["access-control-request-headers"] = "authorization, content-type, x-stainless-os"
                async with client.options(at.url + CHAT, headers=asks) as answer:
                    assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
                    if allowed:
                        assert answer.status == 200 and "POST" in answer.headers["access-control-allow-methods"]
                        permitted = answer.headers["access-control-allow-headers"].replace(" ", "").split(",")
                        assert {"*", "authorization"} <= set(permitted)
                at.picker.refusal = b"{}"
                for _ in range(2):  # an error of the picker, and an answer
                    async with client.post(at.url + CHAT, data=b"{}", headers={"origin": origin}) as answer:
                        assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
                        assert ("retry-after" in answer.headers.get("access-control-expose-headers", "")) == allowed
                    at.picker.refusal = b""

    asyncio.run(main())


def test_websocket_is_refused_with_426() -> None:
    async def main() -> None:
        async with gateway(1) as at:
            for path in ("/v1/responses", "/v1/messages"):
                head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
                head += "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
                reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
                writer.write(head.encode())
                answer = await reader.readuntil(b"\r\n\r\n")
                size = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                assert answer.startswith(b"HTTP/1.1 426")
                assert "cannot be upgraded" in json.loads(await reader.readexactly(size))["error"]["message"]
                writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_form_is_routed_by_its_model(path: str) -> None:
    audio = bytes(range(256)) * 2000

    async def handler(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        file = form["file"]
        assert isinstance(file, web.FileField) and file.file.read() == audio
        return web.json_response({"text": "hello " * 10, "model": form["model"]})

    async def main() -> None:
        async with behind(handler) as at, aiohttp.ClientSession() as client:
            for model, expected_status in (("m", 200), ("unknown", 404), (None, 400)):
                form = aiohttp.FormData()
                form.add_field("file", audio, filename='"model".wav', content_type="audio/wav")
                if model is not None:
                    form.add_field("model", model)
                async with client.post(at.url + path, data=form) as answer:
                    assert answer.status == expected_status, await answer.text()
            used = (await at.next_end()).tokens
            assert used.estimated and 0 < used.prompt <= 1024 and used.output
            for data, status in ((BODY, 415), (b"--x\r\n", 415)):  # an invalid form, and a form instead of JSON
                kind = "application/json" if data is BODY else "multipart/form-data; boundary=x"
                to = path if data is BODY else CHAT
                async with client.post(at.url + to, data=data, headers={"content-type": kind}) as answer:
                    assert answer.status == status and "error" in await answer.json()

    asyncio.run(main())
