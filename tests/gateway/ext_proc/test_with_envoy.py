"""The picker with the real Envoy, with the least configuration that the protocol requires; servers are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from stoker_gateway.envoy.process import envoy_binary
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker

from ...support.waiting import until

_TYPE = "type.googleapis.com/envoy."
_BODY_LIMIT = 24 * 2**20


@dataclass
class Behind:
    """Everything behind Envoy: a picker, and servers that return the request."""

    folder: Path
    model_registry: ModelRegistry = field(default_factory=ModelRegistry)
    pickers: dict[str, EndpointPicker] = field(default_factory=dict)
    picker: PickerServer | None = None
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def waited(self) -> float:
        """Return the number of requests for b that have waited."""
        return self.registry.get_sample_value("stoker:gateway_queue_seconds_count", {"model": "b"}) or 0

    def waiting(self) -> float:
        """Return the number of requests for b that wait."""
        return self.registry.get_sample_value("stoker:gateway_queue_length", {"model": "b"}) or 0

    def say(self, load: ServerLoad) -> None:
        """All servers report this load."""

        def observe() -> None:
            for name, picker in self.pickers.items():
                for server in self.model_registry.endpoints[name].servers:
                    picker.observe(server, load, time.monotonic(), time.monotonic())
                assert self.picker is not None
                self.picker.wake(name)

        self.loop.call_soon_threadsafe(observe)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    folder, ready = tmp_path_factory.mktemp("picker"), threading.Event()
    made, end = Behind(folder), asyncio.Event()

    async def serve() -> None:
        runners = [await _server(name) for name in ("a", "a", "a", "b")]
        addresses = [f"127.0.0.1:{runner.addresses[0][1]}" for runner in runners]
        made.model_registry = ModelRegistry(
            {
                "org/a": Endpoint("org/a", "one", tuple(addresses[:3])),
                "b": Endpoint("b", "two", (addresses[3],)),
                "empty": Endpoint("empty", "none", ()),
            }
        )
        for name, endpoint in made.model_registry.endpoints.items():
            made.pickers[name] = EndpointPicker()
            made.pickers[name].set_servers(endpoint.servers, time.monotonic())
        made.picker = PickerServer(
            made.model_registry, made.pickers, RequestLimits(_BODY_LIMIT, max_wait_s=20), made.registry
        )
        made.picker.listen(f"unix:{folder}/picker.sock")
        await made.picker.start()
        ready.set()
        await end.wait()
        await made.picker.stop(0)
        for runner in runners:
            await runner.cleanup()

    thread = threading.Thread(target=made.loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield made
    made.loop.call_soon_threadsafe(end.set)
    thread.join()
    made.loop.close()


async def _server(name: str) -> web.AppRunner:
    """Run a server that returns the request."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.headers.get("x-stream"):
            response = web.StreamResponse(headers={"x-server": f"127.0.0.1:{port}", "x-model": name})
            await response.prepare(request)
            for number in range(5):
                await response.write(b"data: %d\n\n" % number)
                await asyncio.sleep(0.02)  # sleeps: a server that streams slowly
            return response
        headers = {"x-server": f"127.0.0.1:{port}", "x-model": name, "x-trace": request.headers.get("traceparent", "")}
        return web.Response(body=body, headers=headers)

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    return runner


@pytest.fixture(scope="module", params=["BUFFERED", "FULL_DUPLEX_STREAMED"])
def envoy(
    request: pytest.FixtureRequest, behind: Behind, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("envoy")  # a new one each time: in random order the two modes alternate
    config, ports = folder / "envoy.json", folder / "addresses"
    config.write_text(json.dumps(_config(behind.model_registry, behind.folder / "picker.sock", request.param)))
    binary = envoy_binary()
    process = subprocess.Popen(
        [binary, "-c", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "error",
         "--admin-address-path", ports]
    )  # fmt: skip
    try:
        with httpx.Client(timeout=60, trust_env=False) as client:
            until(lambda: process.poll() is not None or (ports.exists() and ports.read_text()))
            assert process.poll() is None
            listeners: dict[str, Any] = {}
            while not listeners.get("listener_statuses"):
                listeners = client.get(f"http://{ports.read_text()}/listeners?format=json").json()
            port = listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"]
            client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
            yield client
    finally:
        process.kill()
        process.wait()


def _config(model_registry: ModelRegistry, socket: Path, mode: str) -> dict[str, Any]:
    asks = {
        "@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "30s",
        "processing_mode": {
            "request_body_mode": mode,
            "request_trailer_mode": "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP",
            "response_header_mode": "SKIP",
        },
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }
    to = {"cluster_header": "x-stoker-cluster", "timeout": "0s"}
    http = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "stream_error_on_invalid_http_message": True,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "request_body_buffer_limit": _BODY_LIMIT + 2**20,
                    "routes": [{"match": {"prefix": "/"}, "route": to}],
                }
            ]
        },
        "http_filters": [
            {"name": "picker", "typed_config": asks},
            {"name": "router", "typed_config": {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"}},
        ],
    }  # fmt: skip
    return {
        "admin": {"address": _address("127.0.0.1", 0)},
        "static_resources": {
            "listeners": [
                {
                    "name": "all",
                    "address": _address("127.0.0.1", 0),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": http}]}],
                }
            ],
            "clusters": [
                _picker(socket),
                *(
                    _cluster(endpoint, number % 2 == 0)
                    for number, endpoint in enumerate(model_registry.endpoints.values())
                ),
            ],
        },
    }


def _picker(socket: Path) -> dict[str, Any]:
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": f"{_TYPE}{kind}", "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": "picker",
        "typed_extension_protocol_options": {f"envoy.{kind}": http2},
        "load_assignment": _servers("picker", [{"pipe": {"path": str(socket)}}]),
    }


def _cluster(endpoint: Endpoint, by_header: bool) -> dict[str, Any]:
    """Route by the header, or by the metadata."""
    policies, name = f"{_TYPE}extensions.load_balancing_policies", "x-gateway-destination-endpoint"
    source = {"header": name} if by_header else {"metadata": {"key": "envoy.lb", "path": [{"key": name}]}}
    policy = {"name": "other", "typed_config": {"@type": f"{policies}.random.v3.Random"}}
    picked = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [source],
        "fallback_policy": {"policies": [{"typed_extension_config": policy}]},
    }
    addresses = [_address(*server.rsplit(":", 1)) for server in endpoint.servers]
    return {
        "name": endpoint.cluster,
        "load_balancing_policy": {"policies": [{"typed_extension_config": {"name": "picked", "typed_config": picked}}]},
        "load_assignment": _servers(endpoint.cluster, addresses),
    }


def _address(host: str, port: int | str) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _servers(name: str, addresses: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "cluster_name": name,
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}} for address in addresses]}],
    }


def test_requests_reach_the_picked_server_with_unchanged_bodies(envoy: httpx.Client, behind: Behind) -> None:
    body = {"model": "org/a", "prompt": "once upon a time " * 300}
    answers = []
    for _ in range(5):
        behind.say(ServerLoad())
        answers.append(envoy.post("/v1/completions", json=body, headers={"traceparent": "00-ab"}))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-server"] for answer in answers}) == 1  # the prompt's prefix is cached there
    assert answers[0].json() == body and answers[0].headers["x-trace"] == "00-ab"
    assert envoy.post("/v1/completions", json=body | {"model": "b"}).headers["x-model"] == "b"
    for text in (b'{"model": "b" }', b'{"model" : "b", "x": "%s"}' % (b"\xc3\xa9" * 50_000)):
        assert envoy.post("/v1/chat/completions", content=text).content == text
        assert envoy.post("/v1/chat/completions", content=iter([text[:7], text[7:]])).content == text  # in chunks
    behind.say(ServerLoad())


def test_picker_responses_reach_the_client(envoy: httpx.Client) -> None:
    assert [card["id"] for card in envoy.get("/v1/models").json()["data"]] == ["org/a", "b", "empty"]
    assert envoy.get("/v1/models/org/a").json()["id"] == "org/a"
    unknown = envoy.post("/v1/messages", json={"model": "c"}, headers={"x-request-id": "mine"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert unknown.headers["x-request-id"] == "mine"
    assert unknown.headers["content-type"] == "application/json"
    empty = envoy.post("/v1/completions", json={"model": "empty"})
    assert (empty.status_code, empty.headers["retry-after"]) == (503, "1")
    for body in (b"", b"{", b'{"prompt": ""}'):
        assert envoy.post("/v1/completions", content=body).status_code == 400
    assert envoy.get("/v1/completions").status_code == 405
    assert envoy.get("/metrics").status_code == 404
    without_prefix = envoy.post("/chat/completions", json={"model": "b"})
    assert without_prefix.status_code == 404
    assert without_prefix.json()["error"]["message"].endswith("begin with /v1, such as /v1/chat/completions")


def test_a_large_body_passes_and_a_larger_one_does_not(envoy: httpx.Client, behind: Behind) -> None:
    body = json.dumps({"model": "b", "prompt": "x" * 20_000_000}).encode()
    assert envoy.post("/v1/completions", content=body).content == body
    with contextlib.suppress(httpx.WriteError):  # the response may arrive before the upload ends
        assert envoy.post("/v1/completions", content=b" " * (_BODY_LIMIT + 2**21)).status_code == 413
    behind.say(ServerLoad())


def test_a_request_waits_for_room(envoy: httpx.Client, behind: Behind) -> None:
    behind.say(ServerLoad(waiting=100, kv_usage=1.0))
    before = behind.waited()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(envoy.post, "/v1/completions", json={"model": "b"})
        try:
            until(behind.waiting)
        finally:
            behind.say(ServerLoad())
        assert asked.result(60).status_code == 200
    assert behind.waited() == before + 1


def test_a_stream_passes(envoy: httpx.Client) -> None:
    with envoy.stream("POST", "/v1/completions", json={"model": "b"}, headers={"x-stream": "1"}) as answer:
        assert b"".join(answer.iter_raw()) == b"".join(b"data: %d\n\n" % number for number in range(5))
