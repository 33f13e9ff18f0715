"""The loop that scales endpoints: scripted gateway replicas over HTTP, including malicious and silent ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from stoker_common.scaling.gateway_signals import GatewaySignals
from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.api.v1alpha1.scaling import Scaling
from stoker_operator.cluster.store import Store
from stoker_operator.manager.scaling import ScalingLoop, settings_of
from stoker_operator.objects.facts import Key
from stoker_operator.objects.owner import INSTANCE
from stoker_operator.process.metrics import Metrics
from stoker_operator.reconcile.apply import MANAGER
from stoker_operator.reconcile.routing import Route
from stoker_operator.scaling.autoscaler import Phase
from stoker_operator.scaling.behavior import SCALE_DOWN, SCALE_UP, Policy, Rules
from stoker_operator.settings import GatewaySettings
from stoker_operator.workloads.composition import ONE_DEPLOYMENT

from ...support.waiting import until_async

KEY = Key("default", "demo")
GATEWAY = GatewaySettings("http://gateway", "stoker-system", "gateway")


def report(**changes: Any) -> dict[str, Any]:
    endpoint = {"namespace": "default", "name": "demo", "held": 0, "queued": 0, "inFlight": 0, "engines": []}
    return {"gateway": "g", "uptimeSeconds": 1000.0, "endpoints": [endpoint | changes]}


class Gateway:
    """One gateway replica, with its response and the number of requests."""

    def __init__(self) -> None:
        self.answer: Any = report()
        self.status = 200
        self.asked = 0

    async def scaling(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        return web.Response(body=body, status=self.status)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/scaling", self.scaling)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class World:
    """A store with one endpoint and its Deployment, and the loop."""

    def __init__(self, document: Any, signals: GatewaySignals | None) -> None:
        self.store, self.working, self.woken, self.version = Store(MANAGER, INSTANCE), True, list[Key](), 1
        self.route: Route | None = Route("Routed", "", GATEWAY)
        self.clock, self.metrics = 0.0, Metrics()
        made = document()
        made["spec"]["scaling"] = {"minReplicas": 0, "maxReplicas": 4, "target": 2, "idleSecondsToZero": 60}
        self.document = made
        self.put_endpoint()
        self.put_deployment(1)
        self.loop = ScalingLoop(
            signals,
            self.store,
            ONE_DEPLOYMENT,
            lambda _: self.route,
            lambda: self.working,
            self.woken.append,
            self.metrics,
            lambda: self.clock,
        )

    def put_endpoint(self, generation: int = 1, **scaling: Any) -> None:
        self.version += 1
        self.document["spec"]["scaling"] |= scaling
        metadata = {"uid": "u", "generation": generation, "resourceVersion": str(self.version)}
        self.document["metadata"] |= metadata
        self.store.put(json.loads(json.dumps(self.document)))

    def put_deployment(self, replicas: int, available: int | None = None) -> None:
        self.version += 1
        labels = {INSTANCE: "demo"}
        metadata = {"name": "demo", "namespace": "default", "labels": labels, "uid": "d", "generation": 1}
        owner = {"apiVersion": "stoker.dev/v1alpha1", "kind": KIND, "name": "demo", "uid": "u", "controller": True}
        status = {"replicas": replicas, "availableReplicas": replicas if available is None else available}
        self.store.put(
            {
                "kind": "Deployment",
                "metadata": metadata | {"resourceVersion": str(self.version), "ownerReferences": [owner]},
                "spec": {"replicas": replicas},
                "status": status | {"observedGeneration": 1},
            }
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.loop.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def samples(self) -> dict[str, float]:
        """Return the scaling metrics of ``/metrics``, by name and by labels other than the endpoint's."""
        found = {}
        for family in text_string_to_metric_families(self.metrics.text().decode()):
            for sample in family.samples:
                name = sample.name.removeprefix("stoker_operator_scaling_")
                if name != sample.name and not name.startswith("start_from_zero_duration"):
                    labels = dict(sample.labels)
                    endpoint = labels.pop("endpoint_namespace", None), labels.pop("endpoint_name", None)
                    assert endpoint in (KEY, (None, None))
                    found[" ".join((name, *labels.values()))] = sample.value
        return found

    def replicas(self) -> int | None:
        found = self.loop.recommendation(KEY)
        return found.replicas if found else None


def test_endpoint_is_woken_when_its_recommendation_changes(document: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        gateway.answer = report(inFlight=2)
        async with gateway.serving() as address:
            world = World(document, GatewaySignals(address))
            async with world.running():
                await until_async(
                    lambda: (found := world.loop.recommendation(KEY)) and found.reason == "DesiredWithinRange"
                )
                woken, asked = len(world.woken), gateway.asked  # it is woken twice if the first poll had no report
                await until_async(lambda: gateway.asked >= asked + 3)
                assert set(world.woken) == {KEY} and len(world.woken) == woken  # not at each poll
                gateway.answer = report(held=8)
                await until_async(lambda: world.replicas() == 4)
                assert len(world.woken) == woken + 1
                world.put_endpoint(2, maxReplicas=3)
                await until_async(lambda: world.replicas() == 3)
                world.put_endpoint(3, maxReplicas=-1)  # refused: the previous settings apply
                asked = gateway.asked
                await until_async(lambda: gateway.asked >= asked + 2)
                assert world.replicas() == 3

    asyncio.run(main())


def test_loop_scales_to_zero_and_back(document: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        async with gateway.serving() as address:
            world = World(document, GatewaySignals(address))
            async with world.running():
                await until_async(lambda: world.replicas() == 1)
                world.clock = 100.0
                await until_async(lambda: (it := world.loop.recommendation(KEY)) and it.phase is Phase.DRAINING)
                recommended = world.loop.recommendation(KEY)
                assert recommended is not None and recommended.replicas == 1
                gateway.answer = report(drained=recommended.drain)
                await until_async(lambda: world.replicas() == 0)
                world.put_deployment(0)
                gateway.answer = report(held=1)
                await until_async(lambda: world.replicas() == 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, b"{"),
        (200, b"[]"),
        (503, b"it is not known yet what is served"),
        (302, b""),
        (200, report(held=-1)),
        (200, report(inFlight=1e300)),
        (200, b'{"gateway": "g", "uptimeSeconds": NaN, "endpoints": []}'),
        (200, b" " * (17 << 20)),
    ],
    ids=range(8),
)
def test_malformed_report_counts_as_missing(document: Any, status: int, answer: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        gateway.status, gateway.answer = status, answer
        async with gateway.serving() as address:
            world = World(document, GatewaySignals(address))
            world.put_deployment(3)
            async with world.running():
                await until_async(lambda: world.replicas() == 3)
                world.clock = 10_000.0
                asked = gateway.asked
                await until_async(lambda: gateway.asked >= asked + 2)
                recommended = world.loop.recommendation(KEY)
                assert recommended is not None
                assert (recommended.replicas, recommended.reason) == (3, "MissingSignals")

    asyncio.run(main())


def test_unreachable_gateway_counts_as_missing(document: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        async with gateway.serving() as address:
            pass
        world = World(document, GatewaySignals(address))
        async with world.running():
            await until_async(lambda: world.loop.recommendation(KEY) is not None)
            recommended = world.loop.recommendation(KEY)
            assert recommended is not None and recommended.reason == "MissingSignals"
        nowhere = GatewaySignals("no-such-host.invalid:8081")
        assert await nowhere.poll() == {}
        await nowhere.close()

    asyncio.run(main())


def test_one_replica_stays_without_a_gateway(document: Any) -> None:
    async def main() -> None:
        world = World(document, None)
        world.route = None
        async with world.running():
            await until_async(lambda: world.loop.recommendation(KEY) is not None)
            recommended = world.loop.recommendation(KEY)
            assert recommended is not None
            assert (recommended.replicas, recommended.reason) == (1, "NoGateway")

    asyncio.run(main())


def test_standby_polls_no_gateway(document: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        async with gateway.serving() as address:
            world = World(document, GatewaySignals(address))
            async with world.running():
                await until_async(lambda: world.replicas() == 1)
                world.working = False
                await until_async(lambda: world.loop.recommendation(KEY) is None)
                asked = gateway.asked
                await asyncio.sleep(1.5)  # sleeps: time for three polls
                assert gateway.asked <= asked + 1

    asyncio.run(main())


#: Metrics of the operator's process, not of an endpoint.
ALWAYS = {"errors_total", "errors_created"}


def test_metrics_follow_an_endpoint_to_zero_and_back(document: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        gateway.answer = report(held=1, queued=2, inFlight=3)
        async with gateway.serving() as address:
            world = World(document, GatewaySignals(address))
            assert world.samples().keys() == ALWAYS
            async with world.running():
                await until_async(lambda: world.samples().get("status Active DesiredWithinRange") == 1)
                expected = {
                    "desired_replicas": 3, "ready_replicas": 1, "min_replicas": 0, "max_replicas": 4,
                    "metric_value pendingRequests": 6, "metric_target pendingRequests": 2,
                    "requests held": 1, "requests queued": 2, "requests in_flight": 3,
                    "status Active DesiredWithinRange": 1, "rescales_total up": 1, "rescales_total down": 0,
                    "starts_from_zero_total": 0, "start_failures_total": 0,
                    "gateway_replicas reporting": 1, "gateway_replicas missing": 0, "errors_total": 0,
                }  # fmt: skip
                found = world.samples()
                assert {name: value for name, value in found.items() if name != "errors_created"} == expected
                gateway.answer = report()
                world.put_deployment(3)
                await until_async(lambda: world.samples()["ready_replicas"] == 3)
                assert world.samples()["start_seconds"] == 0.0  # by this clock
                world.clock = 1000.0
                await until_async(lambda: "status Draining Draining" in world.samples())
                recommended = world.loop.recommendation(KEY)
                assert recommended is not None
                gateway.answer = report(drained=recommended.drain)
                await until_async(lambda: "status Zero ScaledToZero" in world.samples())
                found = world.samples()
                assert (found["desired_replicas"], found["rescales_total down"]) == (0, 1)
                assert "metric_value pendingRequests" not in found
                world.put_deployment(0)
                await until_async(lambda: world.samples()["ready_replicas"] == 0)
                gateway.answer = report(held=1)
                await until_async(lambda: world.samples()["desired_replicas"] == 1)
                world.clock = 1002.0
                world.put_deployment(1, 0)
                await until_async(lambda: world.samples()["starts_from_zero_total"] == 1)
                world.clock = 1010.0
                world.put_deployment(1)
                await until_async(lambda: world.samples()["ready_replicas"] == 1)
                stages = "stoker_operator_scaling_start_from_zero_duration_seconds_sum"
                value = world.metrics.registry.get_sample_value
                assert (value(stages, {"stage": "written"}), value(stages, {"stage": "ready"})) == (2.0, 8.0)

    asyncio.run(main())


def test_metrics_count_missing_gateways(document: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        gateway.status = 503
        async with gateway.serving() as address:
            world = World(document, GatewaySignals(address))
            async with world.running():
                # The status is the same before the gateway's replicas are known.
                await until_async(lambda: world.samples().get("gateway_replicas missing") == 1)
                await until_async(lambda: "status Active MissingSignals" in world.samples())
                found = world.samples()
                assert (found["gateway_replicas reporting"], found["gateway_replicas missing"]) == (0, 1)
                assert not any(name.startswith(("requests", "metric_value")) for name in found)
                gateway.status = 200
                await until_async(lambda: world.samples()["gateway_replicas reporting"] == 1)
                await until_async(lambda: world.samples().get("requests held") == 0)

    asyncio.run(main())


def test_metrics_of_removed_endpoints_disappear(document: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        async with gateway.serving() as address:
            world = World(document, GatewaySignals(address))
            async with world.running():
                await until_async(lambda: "desired_replicas" in world.samples())
                world.working = False  # immediately: another replica may lead already
                assert world.samples().keys() == ALWAYS
                await until_async(lambda: world.loop.recommendation(KEY) is None)
                world.working = True
                await until_async(lambda: "desired_replicas" in world.samples())
                world.store.remove(world.document)
                await until_async(lambda: world.samples().keys() == ALWAYS)

    asyncio.run(main())


def test_metrics_disappear_without_recent_observations(document: Any) -> None:
    async def main() -> None:
        gateway = Gateway()
        async with gateway.serving() as address:
            world = World(document, GatewaySignals(address))
            async with world.running():
                await until_async(lambda: "desired_replicas" in world.samples())
            world.clock += 30.0
            assert "desired_replicas" in world.samples()
            world.clock += 1.0
            assert "desired_replicas" not in world.samples()

    asyncio.run(main())


def test_metrics_count_internal_errors(document: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError

    async def main() -> None:
        world = World(document, None)
        monkeypatch.setattr("stoker_operator.manager.scaling.parse", fail)
        async with world.running():
            await until_async(lambda: world.samples()["errors_total"] == 1)
            monkeypatch.setattr(world.store, "all", fail)
            await until_async(lambda: world.samples()["errors_total"] >= 3)

    asyncio.run(main())


def test_settings_have_the_hpas_defaults() -> None:
    plain = settings_of(Scaling(maxReplicas=4, target=2))
    assert (plain.min_replicas, plain.metric, plain.idle_seconds_to_zero) == (1, "pendingRequests", 300)
    assert (plain.behavior.scale_up, plain.behavior.scale_down) == (SCALE_UP, SCALE_DOWN)
    down = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}
    given = settings_of(Scaling(maxReplicas=4, target=2, behavior={"scaleDown": down, "scaleUp": {"tolerance": 0}}))
    assert given.behavior.scale_down == Rules(0, (Policy("Pods", 1, 60),), "Max", 0.1)
    assert given.behavior.scale_up.tolerance == 0
