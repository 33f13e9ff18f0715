"""KEDA's external push scaler, called as KEDA calls it. Messages are encoded by the protocol's field numbers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from stoker_common.scaling.signals import EndpointReport, EngineReport, GatewayReport
from stoker_gateway.external_scaler import service
from stoker_gateway.external_scaler.service import ExternalScaler

from ...support.waiting import until_async

KEY = ("ns", "demo")
BUSY, IDLE = b"\x08\x01", b""  # IsActiveResponse: result = 1


def field(number: int, content: bytes) -> bytes:
    """Encode a field of fewer than 128 bytes."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def reference(**metadata: str) -> bytes:
    """Encode a ScaledObjectRef."""
    entries = [field(3, field(1, key.encode()) + field(2, value.encode())) for key, value in metadata.items()]
    return field(1, b"demo") + field(2, b"ns") + b"".join(entries)


def request_for(trigger: bytes, name: str) -> bytes:
    """Encode a GetMetricsRequest."""
    return field(1, trigger) + field(2, name.encode())


def metric(name: str, value: float) -> bytes:
    """Encode a list with one MetricSpec or MetricValue; proto3 omits zeros."""
    return field(1, field(1, name.encode()) + (b"\x19" + struct.pack("<d", value) if value else b""))


def report(engines: dict[str, EngineReport] | None = None, **counts: int) -> GatewayReport:
    counted = {"held": 0, "queued": 0, "in_flight": 0} | counts
    return GatewayReport(
        "g", 100.0, {KEY: EndpointReport(**counted, idle_seconds=None, drained="", engines=engines or {})}
    )


class _Replicas:
    """Replicas that report what a test sets."""

    def __init__(self, **reports: GatewayReport | None) -> None:
        self.reports: dict[str, GatewayReport | None] = reports
        self.num_polls = 0

    async def poll(self) -> dict[str, GatewayReport | None]:
        self.num_polls += 1
        return dict(self.reports)

    async def next_poll(self) -> None:
        """Wait until the next call polls again."""
        await asyncio.sleep(2 * service._PERIOD_S)  # sleeps: only calls trigger polls

    async def close(self) -> None:
        pass


class _Client:
    """Calls the service with raw bytes."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def call(self, method: str, request: bytes) -> bytes:
        return bytes(await self._channel.unary_unary(f"/externalscaler.ExternalScaler/{method}")(request))

    async def error(self, method: str, request: bytes) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await self.call(method, request)
        return failed.value.code(), str(failed.value.details())

    def stream(self, request: bytes) -> Any:
        return self._channel.unary_stream("/externalscaler.ExternalScaler/StreamIsActive")(request)


@contextlib.asynccontextmanager
async def served(replicas: _Replicas) -> AsyncIterator[_Client]:
    scaler = ExternalScaler(replicas)  # type: ignore[arg-type]
    port = scaler.listen("127.0.0.1:0")
    await scaler.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield _Client(channel)
    finally:
        await scaler.stop()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PERIOD_S", 0.02)


def test_metrics_are_sums_over_all_replicas() -> None:
    async def main() -> None:
        engine = EngineReport(running=3, waiting=2, kv_usage=0.25, ready=True, age_seconds=1.0)
        other = EngineReport(running=4, waiting=0, kv_usage=0.5, ready=True, age_seconds=1.0)
        replicas = _Replicas(
            a=report({"1": engine}, held=1, in_flight=5), b=report({"1": engine, "2": other}, queued=2, in_flight=4)
        )
        async with served(replicas) as client:
            for name, asked, total in (
                ("pendingRequests", "pending-requests", 12.0),
                ("runningRequests", "running-requests", 7.0),
                ("kvCacheUsage", "kv-cache-usage", 0.75),
            ):
                trigger = reference(target="2.5", metric=name, scalerAddress="a:1")
                assert await client.call("IsActive", trigger) == BUSY
                assert await client.call("GetMetricSpec", trigger) == metric(asked, 2.5)
                assert await client.call("GetMetrics", field(1, trigger) + field(2, asked.encode())) == metric(
                    asked, total
                )
            code, words = await client.error(
                "GetMetrics", field(1, reference(target="1")) + field(2, b"kv-cache-usage")
            )
            assert code is grpc.StatusCode.NOT_FOUND and "'pending-requests'" in words

    asyncio.run(main())


def test_a_missing_report_is_never_answered_as_zero() -> None:
    async def main() -> None:
        trigger = reference(target="1")
        ask = request_for(trigger, "pending-requests")
        replicas = _Replicas(a=report(), b=None)
        async with served(replicas) as client:
            for method, request in (("IsActive", trigger), ("GetMetrics", ask)):
                code, words = await client.error(method, request)
                assert code is grpc.StatusCode.UNAVAILABLE and "1 of the gateway's replicas" in words and "b" in words
            replicas.reports = {"a": report(held=1), "b": None}
            await replicas.next_poll()
            assert await client.call("IsActive", trigger) == BUSY  # one pending request suffices
            assert (await client.error("GetMetrics", ask))[0] is grpc.StatusCode.UNAVAILABLE
            replicas.reports = {}
            await replicas.next_poll()
            assert (await client.error("IsActive", trigger))[0] is grpc.StatusCode.UNAVAILABLE
            replicas.reports = {"a": report(), "b": report()}
            await replicas.next_poll()
            assert await client.call("IsActive", trigger) == IDLE
            assert await client.call("GetMetrics", ask) == metric("pending-requests", 0)

    asyncio.run(main())


def test_an_endpoint_that_the_gateway_does_not_serve_is_never_idle() -> None:
    """Its clients may use its own Service, and nothing would wake it."""

    async def main() -> None:
        trigger = reference(target="1")
        replicas = _Replicas(a=GatewayReport("g", 100.0, {}), b=GatewayReport("h", 100.0, {}))
        async with served(replicas) as client:
            for method, request in (("IsActive", trigger), ("GetMetrics", request_for(trigger, "pending-requests"))):
                code, words = await client.error(method, request)
                assert code is grpc.StatusCode.NOT_FOUND and "ns/demo" in words
            assert await client.call("GetMetricSpec", trigger) == metric("pending-requests", 1.0)
            stream = client.stream(trigger)
            first = asyncio.create_task(stream.read())
            await replicas.next_poll()
            assert not first.done()
            replicas.reports["b"] = report()  # one replica serves it now
            assert await first == IDLE
            stream.cancel()
            await replicas.next_poll()
            assert await client.call("IsActive", trigger) == IDLE

    asyncio.run(main())


def test_a_pod_without_a_recent_report_fails_the_metrics_of_pods() -> None:
    async def main() -> None:
        silent = EngineReport(running=0, waiting=0, kv_usage=0, ready=True, age_seconds=100.0)
        async with served(_Replicas(a=report({"1": silent}))) as client:
            for name, asked in (("runningRequests", b"running-requests"), ("kvCacheUsage", b"kv-cache-usage")):
                code, words = await client.error(
                    "GetMetrics", field(1, reference(target="1", metric=name)) + field(2, asked)
                )
                assert code is grpc.StatusCode.UNAVAILABLE and "a pod of ns/demo" in words
            pending = request_for(reference(target="1"), "pending-requests")
            assert await client.call("GetMetrics", pending) == metric("pending-requests", 0)

    asyncio.run(main())


def test_stream_reports_changes_and_nothing_while_a_report_is_missing() -> None:
    async def main() -> None:
        replicas = _Replicas(a=report(), b=None)
        async with served(replicas) as client:
            stream = client.stream(reference(target="1"))
            first = asyncio.create_task(stream.read())
            await until_async(lambda: replicas.num_polls > 3)
            assert not first.done()  # its activity is unknown
            replicas.reports["b"] = report()
            assert await first == IDLE
            replicas.reports["b"] = report(held=1)
            assert await stream.read() == BUSY
            replicas.reports["a"] = None
            following, polls = asyncio.create_task(stream.read()), replicas.num_polls
            replicas.reports["b"] = report()
            await until_async(lambda: replicas.num_polls > polls + 3)
            assert not following.done()
            replicas.reports["a"] = report()
            assert await following == IDLE
            stream.cancel()

    asyncio.run(main())


def test_a_stream_repeats_a_wake_while_requests_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(service, "_REPEAT_S", 0.1)
        replicas = _Replicas(a=report(held=1))
        async with served(replicas) as client:
            stream = client.stream(reference(target="1"))
            assert [await stream.read() for _ in range(3)] == [BUSY] * 3
            replicas.reports["a"] = report(in_flight=1)
            following, polls = asyncio.create_task(stream.read()), replicas.num_polls
            await until_async(lambda: replicas.num_polls > polls + 10)
            # One more may have been in flight.
            if following.done():
                following, polls = asyncio.create_task(stream.read()), replicas.num_polls
                await until_async(lambda: replicas.num_polls > polls + 10)
            assert not following.done()
            stream.cancel()

    asyncio.run(main())


def test_many_calls_share_one_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(service, "_PERIOD_S", 60.0)
        replicas = _Replicas(a=report(held=1))
        async with served(replicas) as client:
            answers = await asyncio.gather(*(client.call("IsActive", reference(target="1")) for _ in range(200)))
            assert answers == [BUSY] * 200 and replicas.num_polls == 1

    asyncio.run(main())


def test_wrong_calls_are_refused_and_later_ones_are_served() -> None:
    async def main() -> None:
        draw = random.Random(5)
        async with served(_Replicas(a=report())) as client:
            for method in ("IsActive", "GetMetricSpec"):
                code, words = await client.error(method, reference(metric="cpu", target="1"))
                assert code is grpc.StatusCode.INVALID_ARGUMENT and "'cpu'" in words
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await client.stream(reference()).read()
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "target" in str(failed.value.details())
            assert (await client.error("StreamMetricSpec", reference(target="1")))[0] is grpc.StatusCode.UNIMPLEMENTED
            for _ in range(200):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await client.call(draw.choice(["IsActive", "GetMetrics"]), draw.randbytes(draw.choice([1, 9, 300])))
            assert (await client.error("IsActive", bytes(100_000)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await client.call("IsActive", reference(target="1")) == IDLE

    asyncio.run(main())
