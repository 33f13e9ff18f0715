"""Requests held until a server is ready, with Envoy's real program, the real picker, and servers of the test."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from stoker_gateway.envoy.files import EnvoyFiles
from stoker_gateway.envoy.process import EnvoyProcess
from stoker_gateway.envoy.settings import EnvoySettings
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry, Phase, Scaling
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker

from ..support.waiting import until_async
from .behind_envoy import CHAT, Server

SCALING = Scaling("one", "m", 60.0)
#: Envoy's timeout for a decision, in seconds, unless it is extended.
MESSAGE_TIMEOUT_S = 0.5


@dataclass
class Held:
    """An endpoint with scaling and one server, which is not ready at first."""

    server: Server
    registry: ModelRegistry
    pickers: dict[str, EndpointPicker]
    picker: PickerServer
    port: int
    client: aiohttp.ClientSession
    envoy: EnvoyProcess
    metrics: CollectorRegistry

    def set_scaling(self, scaling: Scaling) -> None:
        """Set the operator's status."""
        self.registry = ModelRegistry({"m": replace(self.registry.endpoints["m"], scaling=scaling)})
        self.picker.update(self.registry, self.pickers)
        self.picker.wake("m")

    def report(self, load: ServerLoad | None = None) -> None:
        """Make the server report that it is ready, or this load."""
        now = time.monotonic()
        self.pickers["m"].observe(self.server.address, load or ServerLoad(), now, now)
        self.picker.wake("m")

    @property
    def state(self) -> dict[str, Any]:
        """Return the report for the autoscaler."""
        (endpoint,) = self.picker.scaling_report()
        return endpoint

    async def ask(self, path: str = CHAT, size: int = 0, key: str = "k") -> tuple[int, dict[str, str], Any]:
        """Return status, headers and JSON of a response."""
        body = json.dumps({"model": "m", "pad": "x" * size}).encode()
        headers = {"authorization": f"Bearer {key}"}
        async with self.client.post(f"http://127.0.0.1:{self.port}{path}", data=body, headers=headers) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.json()

    @property
    def outcomes(self) -> dict[str, float]:
        """Return the numbers of held requests by outcome."""
        name = "stoker:gateway_held_seconds_count"
        samples = (each for family in self.metrics.collect() for each in family.samples if each.name == name)
        return {each.labels["outcome"]: each.value for each in samples}

    async def until_held(self, number: int) -> None:
        """Wait until `number` requests are held."""
        await until_async(lambda: self.state["held"] == number, lambda: self.state)


@asynccontextmanager
async def held(message_timeout_s: float = 60, **limits: Any) -> AsyncIterator[Held]:
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        server = Server("a")
        await server.start()
        settings = EnvoySettings(
            "127.0.0.1", 0, Path(folder), max_wait_s=message_timeout_s - 5, threads=1, upload_s=0.5, max_held_s=60
        )
        registry = ModelRegistry({"m": Endpoint("m", "cluster-m", (server.address,), scaling=SCALING)})
        EnvoyFiles(settings).write(registry)
        pickers = {"m": EndpointPicker()}
        pickers["m"].careful = True
        pickers["m"].set_servers([server.address], time.monotonic())
        metrics = CollectorRegistry()
        picker = PickerServer(registry, pickers, RequestLimits(**limits), metrics)
        picker.listen(f"unix:{settings.picker_socket}")
        await picker.start()
        envoy = EnvoyProcess(settings)
        try:
            await envoy.start()
            async with aiohttp.ClientSession() as client:
                yield Held(server, registry, pickers, picker, await envoy.port(), client, envoy, metrics)
        finally:
            await envoy.end()
            await picker.stop(0)
            await server.stop()


def test_a_held_request_outlives_the_proxys_timeout_and_is_answered() -> None:
    async def main() -> None:
        async with held(MESSAGE_TIMEOUT_S) as at:
            asked = [asyncio.create_task(at.ask()) for _ in range(3)]
            await at.until_held(3)
            await asyncio.sleep(4 * MESSAGE_TIMEOUT_S)  # sleeps: beyond the timeout, which must not end the request
            assert not any(each.done() for each in asked) and not at.server.requests
            at.report()
            for status, headers, answer in await asyncio.gather(*asked):
                assert (status, answer["server"]) == (200, "a")
                assert float(headers["x-stoker-held-seconds"]) > 3 * MESSAGE_TIMEOUT_S
            status, headers, _ = await at.ask()
            assert status == 200 and "x-stoker-held-seconds" not in headers

    asyncio.run(main())


def test_expired_holds_and_failed_starts_are_answered_in_the_apis_format() -> None:
    async def main() -> None:
        async with held() as at:
            at.set_scaling(replace(SCALING, hold_s=0.2))
            status, headers, answer = await at.ask()
            assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
            assert "no ready server" in answer["error"]["message"] and headers["retry-after"] == "5"
            assert float(headers["x-stoker-held-seconds"]) >= 0.2

            at.set_scaling(SCALING)
            paths = (CHAT, "/v1/messages")
            asked = [asyncio.create_task(at.ask(path)) for path in paths]
            await at.until_held(2)
            at.set_scaling(replace(SCALING, start_failure='the image "x:1" cannot be pulled'))
            for path, (status, headers, answer) in zip(paths, await asyncio.gather(*asked), strict=True):
                assert status == 503 and 'image "x:1" cannot' in answer["error"]["message"]
                assert headers["x-should-retry"] == "false" and "retry-after" not in headers
                assert answer.get("type") == ("error" if path == "/v1/messages" else None)
            assert (await at.ask())[0] == 503 and at.state["held"] == 0
            at.report()
            assert (await at.ask())[0] == 200  # a server is ready, regardless of earlier failures
            assert at.outcomes == {"timed_out": 1, "start_failed": 3}
            at.report(ServerLoad(ready=False))
            at.set_scaling(SCALING)
            waiting = asyncio.create_task(at.ask())
            await at.until_held(1)
            at.picker.update(ModelRegistry(), {})
            assert (await waiting)[0] == 503 and at.outcomes == {}  # the model was removed

    asyncio.run(main())


def test_disconnected_client_frees_its_held_bytes() -> None:
    async def main() -> None:
        async with held(max_held=2, max_held_bytes=300_000) as at:
            large, small = asyncio.create_task(at.ask(size=250_000)), asyncio.create_task(at.ask())
            await at.until_held(2)
            status, headers, answer = await at.ask()  # a third request
            assert status == 503 and "no more requests are held" in answer["error"]["message"]
            assert headers["retry-after"] == "5" and "x-stoker-held-seconds" not in headers
            small.cancel()
            await at.until_held(1)
            assert (await at.ask(size=100_000))[0] == 503  # there is no room for its bytes
            large.cancel()
            await at.until_held(0)
            asked = asyncio.create_task(at.ask(size=200_000))
            await at.until_held(1)
            at.report()
            assert (await asked)[0] == 200 and len(at.server.requests) == 1

    asyncio.run(main())


def test_incomplete_upload_is_refused_with_408() -> None:
    async def main() -> None:
        async with held(upload_s=0.3) as at:
            at.report()
            for path in (CHAT, "/v1/messages"):
                reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
                writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nx".encode())
                answer = await reader.read(1 << 16)
                assert answer.startswith(b"HTTP/1.1 408"), answer
                writer.close()
            assert not at.server.requests

    asyncio.run(main())


def test_requests_are_held_while_an_endpoint_drains_and_sent_after() -> None:
    async def main() -> None:
        async with held() as at:
            at.report()
            at.server.does = "hang"
            under_way = asyncio.create_task(at.ask())
            await at.server.until_requests(1)
            assert at.state["inFlight"] == 1
            assert (await at.envoy.active_by_cluster())["cluster-m"] == 1
            known = await at.envoy.request("GET", "/stats?filter=cluster-m")
            assert "upstream_rq_pending_active: 0" in known  # requests that wait for a connection
            at.set_scaling(replace(SCALING, phase=Phase.DRAINING, drain="w"))
            asked = [asyncio.create_task(at.ask()) for _ in range(3)]
            await at.until_held(3)
            at.report()
            assert at.state["held"] == 3 and len(at.server.requests) == 1 and "drained" not in at.state
            at.server.more.set()
            assert (await under_way)[0] == 200
            assert "cluster-m" not in await at.envoy.active_by_cluster()
            at.server.does = "answer"
            at.set_scaling(SCALING)
            assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 3

    asyncio.run(main())
