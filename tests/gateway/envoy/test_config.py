"""Envoy's real program with the gateway's configuration: which requests reach which server, and which none."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry

_SPEC = spec_from_file_location("scripted_picker", Path(__file__).parents[1] / "scripted_picker.py")
assert _SPEC and _SPEC.loader
_MODULE = module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

CHAT = "/v1/chat/completions"


class Gateway:
    """Envoy between a scripted picker and two servers that return their name and the request."""

    def __init__(self, picker: Any, url: str, servers: list[str], grpc_server: Any) -> None:
        self.picker, self.url, self.servers, self.grpc_server = picker, url, servers, grpc_server

    async def raw(self, text: bytes) -> bytes:
        """Send these bytes, and return the whole response."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(text)
        answer = await asyncio.wait_for(reader.read(), 120)
        writer.close()
        return answer


async def _stub(name: str) -> tuple[web.AppRunner, str]:
    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        seen = {"server": name, "path": request.raw_path, "headers": dict(request.headers), "size": len(body)}
        return web.json_response(seen)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"127.0.0.1:{runner.addresses[0][1]}"


@asynccontextmanager
async def _gateway() -> AsyncIterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        stubs = [await _stub("a"), await _stub("b")]
        servers = [address for _, address in stubs]
        settings = EnvoySettings("127.0.0.1", 0, Path(folder), max_wait_s=1, max_body_bytes=24 << 20, threads=1)
        EnvoyFiles(settings).write(ModelRegistry({"m": Endpoint("m", "cluster-m", tuple(servers))}))
        picker = _MODULE.ScriptedPicker("cluster-m", servers[0])
        grpc_server = await picker.serve(settings.picker_socket)
        envoy = EnvoyProcess(settings)
        try:
            await envoy.start()
            yield Gateway(picker, f"http://127.0.0.1:{await envoy.port()}", servers, grpc_server)
        finally:
            await envoy.end()
            await grpc_server.stop(0)
            for runner, _ in stubs:
                await runner.cleanup()


def test_only_api_requests_reach_the_picked_server() -> None:
    async def main() -> None:
        async with _gateway() as gateway, aiohttp.ClientSession() as client:

            async def post(path: str = CHAT, body: bytes = b"{}", **headers: str) -> tuple[int, Any, Any]:
                async with client.post(gateway.url + path, data=body, headers=headers) as answer:
                    text = await answer.text()
                    return answer.status, (json.loads(text) if text else None), answer.headers

            for server, name in zip(gateway.servers, "ab", strict=True):
                gateway.picker.destination = server
                status, seen, _ = await post()
                assert (status, seen["server"]) == (200, name)

            hostile = {"X-Stoker-Key": "1", "X-Envoy-Retry-On": "5xx", "X-Gateway-Destination-Endpoint": "1.2.3.4:5"}
            _, seen, _ = await post(**hostile, traceparent="00-1-2-3", **{"X-Request-Id": "mine"})
            got = {name.lower(): value for name, value in seen["headers"].items()}
            assert got["traceparent"] == "00-1-2-3"
            assert got["x-request-id"] == "mine"
            assert "x-stoker-key" not in got
            assert not [name for name in got if name.startswith("x-envoy")]
            assert got.get("x-gateway-destination-endpoint") == gateway.picker.destination

            status, seen, _ = await post(body=b"x" * (20 << 20))
            assert (status, seen.get("size")) == (200, 20 << 20)
            status, seen, _ = await post(body=b"x" * (25 << 20))
            assert status == 413
            assert seen["error"]["type"] == "invalid_request_error"

            # An address that is no server of the endpoint is never used, nor replaced by another server.
            gateway.picker.destination = "127.0.0.1:1"
            status, seen, headers = await post()
            assert status == 503
            assert headers["retry-after"] == "1"
            assert seen["error"]["type"] == "service_unavailable_error"
            status, seen, _ = await post("/v1/messages")
            assert (status, seen["type"], seen["error"]["type"]) == (503, "error", "overloaded_error")
            gateway.picker.destination = gateway.servers[0]

            absent = ("/metrics", "//metrics", "/v1/../metrics", "/v1/%2e%2e/metrics", "/health/../metrics", "/")
            absent += ("/v1/..%2fmetrics", "/v1/..%5cmetrics", "/v1%2F%2e%2e%2Fmetrics", "/%2Fmetrics", "/\\metrics")
            absent += ("/v1/%5c..%5cmetrics", "/v1/..%252fmetrics")
            requests = [f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" for path in absent]
            answers = await asyncio.gather(*(gateway.raw(text.encode()) for text in requests))
            for path, answer in zip(absent, answers, strict=True):
                assert answer.startswith(b"HTTP/1.1 404"), (path, answer)
                assert b"not_found_error" in answer
            for sent, path in (
                ("/v1/models/org%2Fa", "/v1/models/org/a"),
                ("/v1/models/%5cb", "/v1/models/b"),
                ("/v1/models/..%252fmetrics", "/v1/models/..%252fmetrics"),
            ):
                answer = await gateway.raw(f"GET {sent} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["path"] == path

            both = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"
            answer = await gateway.raw(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\n" + both)
            assert answer.startswith(b"HTTP/1.1 400")
            assert answer.count(b"HTTP/1.1") == 1

            gateway.picker.refusal = b'{"of": "the picker"}'
            assert (await post())[:2] == (404, {"of": "the picker"})
            gateway.picker.refusal = b""

            await gateway.grpc_server.stop(0)
            status, seen, headers = await post()
            assert (status, headers["retry-after"]) == (503, "1")
            assert seen["error"]["type"] == "service_unavailable_error"

    asyncio.run(main())
