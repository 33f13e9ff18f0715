"""``stoker gateway --external-scaler-listen`` with real Envoy: an endpoint is scaled to zero and back as by KEDA, by
the gateway's responses.
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from stoker_gateway.cli.gateway import main
from stoker_gateway.external_scaler.messages import (
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    ScaledObjectRef,
)

from ...support.waiting import until_async
from .stand_in_api import ENDPOINTS, Object, endpoint
from .test_scaling import Gateway, Pod, gateway

_TRIGGER = ScaledObjectRef(name="a", namespace="one", scalerMetadata={"target": "2"})


class _Keda:
    """Calls the external scaler."""

    def __init__(self, channel: Any) -> None:
        prefix = "/externalscaler.ExternalScaler"
        self._metrics = channel.unary_unary(
            f"{prefix}/GetMetrics", GetMetricsRequest.SerializeToString, GetMetricsResponse.FromString
        )
        self.stream = channel.unary_stream(
            f"{prefix}/StreamIsActive", ScaledObjectRef.SerializeToString, IsActiveResponse.FromString
        )

    async def value(self) -> float | None:
        """Return the metric's value; None if the call fails."""
        request = GetMetricsRequest(scaledObjectRef=_TRIGGER, metricName="pending-requests")
        with suppress(grpc.aio.AioRpcError):
            return float((await self._metrics(request)).metricValues[0].metricValueFloat)
        return None


def _scaled_by_keda() -> Object:
    """Return the endpoint after KEDA has set 0: the 0 has no managed-fields entry."""
    seen = endpoint("a", replicas=0)
    seen["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:model": {}}}}]
    return seen


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def test_keda_scales_an_endpoint_to_zero_and_back(tmp_path: Path) -> None:
    async def run() -> None:
        pod = Pod()
        metrics, scaler = _free_port(), _free_port()
        flags = ("--metrics-port", str(metrics), "--external-scaler-listen", f"127.0.0.1:{scaler}")
        async with gateway(tmp_path, pod, flags=flags) as at:
            # It is not scaled yet, but its requests count.
            at.api.put(ENDPOINTS, endpoint("a"))
            assert await until_async(lambda: _status(at)) == 200
            async with grpc.aio.insecure_channel(f"127.0.0.1:{scaler}") as channel:
                keda = _Keda(channel)
                activity = keda.stream(_TRIGGER)
                await until_async(lambda: _is(keda, 0))
                pod.gate.clear()
                under_way = [asyncio.create_task(at.ask(str(number))) for number in range(3)]
                await until_async(lambda: _is(keda, 3))
                assert await _next(activity, True)
                pod.gate.set()
                assert [status for status, _ in await asyncio.gather(*under_way)] == [200] * 3
                assert await _next(activity, False)
                await until_async(lambda: _is(keda, 0))

                at.api.put(ENDPOINTS, _scaled_by_keda())  # KEDA sets 0
                await until_async(lambda: _is_scaled(at))
                at.pods()
                await at.until(engines=[], held=0)
                asked = [asyncio.create_task(at.ask(str(number))) for number in range(5)]
                assert await _next(activity, True)
                await until_async(lambda: _is(keda, 5))
                assert not any(each.done() for each in asked)
                pod.ready = False
                at.pods(pod, ready=False)  # KEDA sets 1
                await until_async(lambda: _has_engine(at))
                pod.ready = True
                answers = await asyncio.gather(*asked)
                assert {status for status, _ in answers} == {200}
                assert all(held is not None and held > 0 for _, held in answers)

                # A user's manifest sets 0: nothing is held.
                seen = endpoint("a", replicas=0)
                seen["metadata"]["managedFields"] = [{"manager": "me", "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
                at.api.put(ENDPOINTS, seen)
                at.pods()
                assert await until_async(lambda: _status(at, 503)) == 503

    asyncio.run(run())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--endpoint", "a=http://127.0.0.1:1", "--external-scaler-listen", "127.0.0.1:1"],
            "not allowed without --kubernetes",
        ),
        (["--kubernetes", "--namespace", "a", "--external-scaler-listen", "127.0.0.1:1"], "add --metrics-port"),
        (["--kubernetes", "--namespace", "a", "--external-scaler-listen", "nowhere"], "is not HOST:PORT"),
    ],
)
def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert re.search(rf"--external-scaler-listen: .*{words}", capsys.readouterr().err, re.DOTALL)


async def _status(at: Gateway, expected: int = 200) -> int | None:
    status, _ = await at.ask()
    return status if status == expected else None


async def _is(keda: _Keda, expected: float) -> bool:
    return await keda.value() == expected


async def _is_scaled(at: Gateway) -> bool:
    """Return whether the gateway knows that the endpoint is scaled: then it reports its idle time."""
    assert (await at.ask())[0] == 200
    state = await at.state()
    return state is not None and "idleSeconds" in state


async def _has_engine(at: Gateway) -> bool:
    state = await at.state()
    return bool(state and state["engines"])


async def _next(activity: Any, expected: bool) -> bool:
    """Read until `expected` is reported; True is repeated while requests are held."""
    while (await activity.read()).result is not expected:
        pass
    return True
