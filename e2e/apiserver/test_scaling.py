"""Endpoints with ``spec.scaling`` on a real API server, from a scripted gateway's reports to the Deployment's replicas.

There are no nodes: pods never run, and the tests set which of them are ready.
"""

from __future__ import annotations

import gzip
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from .cluster_client import GROUP, PLURAL, SYSTEM, VERSION, wait_for
from .operator_process import Operator, check_log
from .scripted_gateway import Answer, ScriptedGateway, ScriptedReplica, send

Object = dict[str, Any]
PROGRAM = Path(__file__).with_name("named_operator.py")
#: Behavior that follows reports at once.
AT_ONCE = {"scaleDown": {"stabilizationWindowSeconds": 0}}
#: Number of polls of a gateway's replica after which a changed report has had its full effect.
POLLS = 5
SCALE = f"/apis/{GROUP}/{VERSION}/namespaces/{{}}/{PLURAL}/{{}}/scale"


def scaling(**changes: Any) -> Object:
    """Return ``spec.scaling`` that changes the replicas at once and never goes to zero."""
    return {"minReplicas": 1, "maxReplicas": 3, "target": 2, "behavior": AT_ONCE, **changes}


@dataclass(frozen=True)
class Scaled:
    """A scaled endpoint."""

    kube: Any
    gateway: ScriptedGateway
    namespace: str
    name: str

    def report(self, *replicas: int, held: int = 0, queued: int = 0, in_flight: int = 0) -> None:
        """Make gateway replicas, by default all, report these requests, or a long idle time if there are none."""
        idle = 0.0 if held or queued or in_flight else 1000.0
        entry = {"held": held, "queued": queued, "inFlight": in_flight, "idleSeconds": idle, "engines": []}
        for number in replicas or range(len(self.gateway.replicas)):
            self.gateway.replicas[number].reports[self.namespace, self.name] = entry

    def acknowledge(self, *replicas: int, drain_id: str = "") -> None:
        """Make gateway replicas, by default all, acknowledge `drain_id`, or the current one."""
        drain_id = drain_id or self.status().get("drain", "")
        for number in replicas or range(len(self.gateway.replicas)):
            reports = self.gateway.replicas[number].reports
            reports[self.namespace, self.name] = {**reports[self.namespace, self.name], "drained": drain_id}

    def endpoint(self) -> Object:
        found: Object = self.kube.endpoint(self.namespace, self.name)
        return found

    def deployment(self) -> Object:
        found: Object = self.kube.deployment(self.namespace, self.name)
        return found

    def scale(self) -> Object:
        """Return the scale subresource."""
        found: Object = self.kube.get(SCALE.format(self.namespace, self.name))
        return found

    def status(self) -> Object:
        """Return ``status.scaling``; empty if it is missing."""
        found: Object = self.endpoint().get("status", {}).get("scaling", {})
        return found

    def phase(self) -> str:
        return str(self.status().get("phase", ""))

    def condition(self) -> Object:
        found: Object = self.kube.condition(self.namespace, self.name, "Scaling")
        return found

    def message(self) -> str:
        """Return the condition's message; empty if it does not describe the newest spec yet."""
        return str(self.condition().get("message", ""))

    def count(self) -> int:
        found: int = self.deployment()["spec"]["replicas"]
        return found

    def changes(self) -> int:
        """Return the number of changes of the Deployment's spec, including its replicas."""
        found: int = self.deployment()["metadata"]["generation"]
        return found

    def pods(self) -> set[str]:
        return {each.metadata.uid for each in self.kube.pods(self.namespace, self.name)}

    def serves(self, count: int) -> bool:
        """Mark existing pods as ready; return whether there are `count` pods, all ready."""
        for pod in self.kube.pods(self.namespace, self.name):
            if not any(each.type == "Ready" for each in pod.status.conditions or ()):
                self.kube.mark_ready(self.namespace, pod.metadata.name)
        status = self.deployment()["status"]
        is_all = status.get("replicas", 0) == status.get("availableReplicas", 0) == count
        return is_all and self.count() == count

    def settle(self, count: int) -> None:
        """Wait until `count` pods serve, and the status reports them."""
        wait_for(lambda: self.serves(count), f"{count} pods serve")
        wait_for(lambda: self.endpoint().get("status", {}).get("availableReplicas") == count, "the status reports them")

    def go_to_zero(self) -> None:
        """Wait until it has no pods; all replicas of the gateway acknowledge that it has no requests."""
        self.report()

        def is_zero() -> bool:
            self.acknowledge()
            return self.phase() == "Zero" and self.count() == 0

        wait_for(is_zero, "it is scaled to zero")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    """The gateway of this module's operators."""
    gateway = ScriptedGateway(tmp_path_factory.mktemp("gateway") / "addresses")
    yield gateway
    gateway.stop()


@pytest.fixture(scope="module")
def operators(
    kube: Any, scripted: ScriptedGateway, sleeping_operator: Operator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Operator, Operator]]:
    """Two replicas of the operator, not started."""
    sleeping_operator.stop()
    folder = tmp_path_factory.mktemp("operators")
    lease = ("--leader-elect", "--lease-name=scaling", f"--operator-namespace={SYSTEM}")
    words = (*lease, *scripted.options)
    first, second = (Operator(kube.kubeconfig, folder / name, *words, program=(str(PROGRAM),)) for name in "ab")
    for each in (first, second):
        each.environment |= scripted.environment
    yield first, second
    for each in (first, second):
        each.stop()
        if each.log.exists():
            check_log(each.log)


@pytest.fixture
def operator(operators: tuple[Operator, Operator], sleeping_operator: Operator) -> Operator:
    """The operator, running."""
    sleeping_operator.stop()
    operators[0].start()
    return operators[0]


@pytest.fixture
def gateway(scripted: ScriptedGateway) -> ScriptedGateway:
    """Two replicas of the gateway, which report."""
    scripted.resize(2)
    for each in scripted.replicas:
        each.reports.clear()
    return scripted


@pytest.fixture
def create(kube: Any, gateway: ScriptedGateway, ns: str, document: Any) -> Callable[..., Scaled]:
    """Create an endpoint that the gateway serves, without requests: ``create("demo", maxReplicas=4)``."""
    kube.core.patch_namespace(ns, {"metadata": {"labels": {"stoker.dev/gateway": "enabled"}}})

    def make(name: str = "demo", **changes: Any) -> Scaled:
        model = {"source": "demo://gemma-3-270m", "servedNames": [f"{ns}-{name}"]}  # unique to this test
        kube.create(ns, document(name, model=model, scaling=scaling(**changes)), field_manager="gitops")
        scaled = Scaled(kube, gateway, ns, name)
        scaled.report()
        return scaled

    return make


def wait_polls(replica: ScriptedReplica, count: int = POLLS) -> None:
    """Wait until the operator has polled a replica `count` more times."""
    until = replica.num_requests + count
    wait_for(lambda: replica.num_requests >= until, f"{count} more requests")


def test_recommended_count_changes_only_the_deployment(operator: Operator, create: Callable[..., Scaled]) -> None:
    scaled = create(minReplicas=0, idleSecondsToZero=1)
    created = scaled.endpoint()
    scaled.settle(1)
    scaled.go_to_zero()
    wait_for(lambda: scaled.scale()["status"]["replicas"] == 0, "no pod is reported")
    scaled.report(0, held=1)
    scaled.settle(1)
    scaled.report(1, queued=20)
    scaled.settle(3)
    wait_for(lambda: scaled.scale()["status"]["replicas"] == 3, "three pods are reported")
    scale = scaled.scale()
    assert scale["spec"]["replicas"] == created["spec"]["replicas"]
    assert "app.kubernetes.io/instance=demo" in scale["status"]["selector"]
    scaled.report()
    scaled.settle(1)

    endpoint = scaled.endpoint()
    assert endpoint["spec"] == created["spec"]
    assert endpoint["metadata"]["generation"] == created["metadata"]["generation"]
    written = [each for each in endpoint["metadata"]["managedFields"] if each["manager"] != "gitops"]
    assert written and all(each.get("subresource") == "status" for each in written)
    assert all(set(each["fieldsV1"]) == {"f:status"} for each in written)
    assert [each for each in endpoint["metadata"]["managedFields"] if each not in written] == (
        [each for each in created["metadata"]["managedFields"] if each["manager"] == "gitops"]
    )


def test_zero_requires_the_acknowledgement_of_each_replica(operator: Operator, create: Callable[..., Scaled]) -> None:
    scaled = create(minReplicas=0, idleSecondsToZero=1)
    scaled.settle(1)
    before = scaled.changes()
    drain_id = wait_for(lambda: scaled.status().get("drain"), "it drains")
    wait_polls(scaled.gateway.replicas[0])
    scaled.acknowledge(0)
    scaled.acknowledge(1, drain_id=f"not {drain_id}")
    wait_polls(scaled.gateway.replicas[0])
    assert (scaled.count(), scaled.changes()) == (1, before)
    scaled.report(1, in_flight=1)
    scaled.acknowledge(1)
    wait_polls(scaled.gateway.replicas[0])
    assert (scaled.count(), scaled.changes()) == (1, before)
    scaled.go_to_zero()
    assert scaled.changes() == before + 1
    assert scaled.status()["drain"]
    wait_for(lambda: scaled.kube.condition(scaled.namespace, scaled.name)["reason"] == "ScaledToZero", "it is Ready")


def test_drain_is_withdrawn_or_lapses(operator: Operator, create: Callable[..., Scaled]) -> None:
    """A held request withdraws a drain; without each replica's acknowledgement it lapses."""
    held, lapsed = (create(name, minReplicas=0, idleSecondsToZero=1) for name in ("held", "lapsed"))
    for each in (held, lapsed):
        each.settle(1)
    before = held.changes(), lapsed.changes()
    for each in (held, lapsed):
        wait_for(lambda each=each: each.phase() == "Draining", "it drains")
    lapsed.acknowledge(0)
    held.acknowledge(0)
    held.report(1, held=1)
    held.acknowledge(1)
    for each in (held, lapsed):
        wait_for(lambda each=each: each.phase() == "Active", "it is active again")
        assert "drain" not in each.status()
    assert (held.changes(), lapsed.changes()) == before


def test_a_silent_replica_keeps_the_count(
    operator: Operator, create: Callable[..., Scaled], gateway: ScriptedGateway
) -> None:
    shrinking = create("shrinking", minReplicas=3, maxReplicas=4)
    resting = create("resting", minReplicas=0, idleSecondsToZero=3600)
    for each, count in ((shrinking, 3), (resting, 1)):
        each.settle(count)
    before = shrinking.changes(), resting.changes()
    answering, silent = gateway.replicas
    silent.answer = hang
    for each in (shrinking, resting):
        # The reason alone is not enough: the condition also has it before the operator's first poll.
        wait_for(lambda each=each: silent.address in each.message(), "the silence is noticed")
        assert (each.condition()["status"], each.condition()["reason"]) == ("Unknown", "MissingSignals")
    for each, changed in ((shrinking, {"minReplicas": 1}), (resting, {"idleSecondsToZero": 1})):
        each.kube.patch(each.namespace, each.name, {"scaling": changed})
    wait_polls(answering)
    assert (shrinking.changes(), resting.changes()) == before
    assert (shrinking.phase(), resting.phase()) == ("Active", "Active")
    shrinking.report(0, queued=20)
    shrinking.settle(4)
    shrinking.report(0)
    wait_polls(answering)
    assert shrinking.count() == 4
    silent.answer = None
    shrinking.settle(1)
    wait_for(lambda: resting.phase() == "Draining", "it drains")


def hang(handler: BaseHTTPRequestHandler) -> None:
    """Send no response before the operator has closed the connection."""
    handler.connection.recv(1)


def drip(body: bytes) -> Answer:
    """Send `body` so slowly that the operator gives up."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for byte in body:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.1)  # sleeps: simulates a slow gateway

    return answer


def hostile_answers(entry: Object) -> dict[str, Answer]:
    """Return responses that must be ignored.

    Each has exactly one fault; if it is readable, it reports more requests than three replicas can serve.
    """
    endpoint = {**entry, "held": 50, "queued": 0, "inFlight": 0, "idleSeconds": 0.0, "engines": []}
    engine = {"address": "10.0.0.1:80", "running": 9, "waiting": 50, "kvUsage": 0.5, "ready": True, "ageSeconds": 0}
    valid = {"gateway": "hostile", "uptimeSeconds": 1.0, "endpoints": [endpoint]}
    body = json.dumps(valid).encode()

    def with_endpoint(**changes: Any) -> Answer:
        text = json.dumps({**valid, "endpoints": [{**endpoint, **changes}]}).encode()
        return lambda handler: send(handler, text)

    def with_engine(**changes: Any) -> Answer:
        return with_endpoint(engines=[{**engine, **changes}])

    def plain(text: bytes, status: int = 200, **headers: str) -> Answer:
        return lambda handler: send(handler, text, status, **headers)

    def redirect(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/scaling":
            send(handler, b"", 302, Location="/elsewhere")
        else:
            send(handler, body)

    rng = random.Random(11)
    cut = rng.randrange(1, len(body) - 1)
    return {
        "negative": with_endpoint(queued=-1),
        "NaN": with_endpoint(queued=float("nan")),
        "infinite": with_endpoint(inFlight=float("inf")),
        "huge": with_endpoint(held=10**30),
        "fractional": with_endpoint(held=50.5),
        "text for a number": with_endpoint(held="50"),
        "true for a number": with_endpoint(queued=True),
        "null for a number": with_endpoint(inFlight=None),
        "negative idle time": with_endpoint(idleSeconds=-1e-9),
        "a long drain id": with_endpoint(drained="x" * 513),
        "twice the same endpoint": plain(json.dumps({**valid, "endpoints": [endpoint, endpoint]}).encode()),
        "engine that waits negatively": with_engine(waiting=-50),
        "engine with a NaN": with_engine(kvUsage=float("nan")),
        "engine with a full cache and more": with_engine(kvUsage=1.01),
        "engine ready by a word": with_engine(ready="yes"),
        "a list": plain(json.dumps([valid]).encode()),
        "endpoints in an object": plain(json.dumps({**valid, "endpoints": {"0": endpoint}}).encode()),
        "deep": plain(b"[" * 100_000),
        "cut off": plain(body[:cut]),
        "noise": plain(rng.randbytes(4096)),
        "empty": plain(b""),
        "17 MB": plain(body + b" " * (17 * 10**6)),
        "compressed": plain(gzip.compress(body), Content_Encoding="gzip"),
        "an error": plain(body, 500),
        "redirect": redirect,
        "slow": drip(body),
        "silent": hang,
    }


def test_hostile_reports_change_nothing(
    operator: Operator, create: Callable[..., Scaled], gateway: ScriptedGateway
) -> None:
    scaled = create()
    answers = hostile_answers({"namespace": scaled.namespace, "name": scaled.name})
    scaled.settle(1)
    before, logged = scaled.changes(), len(operator.log.read_text())
    gateway.resize(1 + len(answers))
    honest, *hostile = gateway.replicas
    for replica, answer in zip(hostile, answers.values(), strict=True):
        replica.answer = answer

    def are_refused() -> bool:
        text = operator.log.read_text()[logged:]
        return all(
            f"no report from the gateway's replica at {each.address}:{gateway.port}:" in text for each in hostile
        )

    wait_for(are_refused, "all answers are refused")
    wait_polls(honest)
    assert (scaled.count(), scaled.changes()) == (1, before)
    assert scaled.condition()["reason"] == "MissingSignals"
    # The same report without the fault counts.
    hostile[0].answer = lambda handler: send(handler, honest_report(scaled, held=50))
    scaled.settle(3)


def honest_report(scaled: Scaled, held: int) -> bytes:
    """Return a valid report of `held` requests."""
    endpoint = {
        "namespace": scaled.namespace, "name": scaled.name, "held": held, "queued": 0, "inFlight": 0,
        "idleSeconds": 0.0, "engines": [],
    }  # fmt: skip
    return json.dumps({"gateway": "a", "uptimeSeconds": 1.0, "endpoints": [endpoint]}).encode()


def test_another_autoscaler_is_reported_and_has_no_effect(
    operator: Operator, kube: Any, create: Callable[..., Scaled]
) -> None:
    """Manual changes by kubectl are not reported: kubectl does not write again."""
    scaled = create()
    scaled.settle(1)
    before = scaled.changes()
    write_scale(scaled, 5, "kubectl-scale")
    wait_polls(scaled.gateway.replicas[0])
    wait_for(scaled.message, "the condition is about the newest spec")
    assert "spec.replicas" not in scaled.message()
    target = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "InferenceEndpoint", "name": scaled.name}
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "foreign"},
        "spec": {"scaleTargetRef": target, "minReplicas": 6, "maxReplicas": 8},
    }
    path = f"/apis/autoscaling/v2/namespaces/{scaled.namespace}/horizontalpodautoscalers"
    kube.api.call_api(*kube.api.param_serialize("POST", path, header_params=JSON, body=hpa)).read()
    wait_for(lambda: scaled.endpoint()["spec"]["replicas"] == 6, "the HorizontalPodAutoscaler has written")
    hpa_text = "kube-controller-manager (a HorizontalPodAutoscaler), at "
    wait_for(lambda: hpa_text in scaled.message(), "it is reported")
    write_scale(scaled, 7, "keda")
    wait_for(lambda: "keda, at " in scaled.message(), "the last one is reported")
    wait_polls(scaled.gateway.replicas[0])
    assert scaled.endpoint()["spec"]["replicas"] == 7  # the operator does not revert it
    assert (scaled.count(), scaled.changes(), scaled.scale()["status"]["replicas"]) == (1, before, 1)
    assert scaled.condition()["status"] == "True"
    scaled.report(0, queued=20)
    scaled.settle(3)
    assert scaled.endpoint()["spec"]["replicas"] == 7


JSON = {"Accept": "application/json", "Content-Type": "application/json"}


def write_scale(scaled: Scaled, replicas: int, manager: str) -> None:
    """Write the scale subresource."""
    scaled.kube.custom.patch_namespaced_custom_object_scale(
        GROUP,
        VERSION,
        scaled.namespace,
        PLURAL,
        scaled.name,
        {"spec": {"replicas": replicas}},
        field_manager=manager,
        _content_type="application/merge-patch+json",
    )


def test_changed_scaling_restarts_no_pod(operator: Operator, create: Callable[..., Scaled]) -> None:
    scaled = create(minReplicas=3)
    scaled.report(in_flight=20)
    scaled.settle(3)
    template, pods = scaled.deployment()["spec"]["template"], scaled.pods()
    changes: list[Object | None] = [
        {"target": 5},
        {"metric": "runningRequests"},
        {"behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 1}]}}},
        {"holdSeconds": 60},
        {"minReplicas": 0, "idleSecondsToZero": 3600},
        {"minReplicas": 2, "maxReplicas": 3, "idleSecondsToZero": None},
        None,  # without scaling, spec.replicas applies
        scaling(minReplicas=4, maxReplicas=4),
    ]
    for change in changes:
        scaled.kube.patch(scaled.namespace, scaled.name, {"scaling": change, "replicas": 3})
        generation = scaled.endpoint()["metadata"]["generation"]
        wait_for(lambda at=generation: scaled.endpoint()["status"]["observedGeneration"] == at, "the change is seen")
        assert scaled.deployment()["spec"]["template"] == template
    scaled.settle(4)
    assert pods < scaled.pods()


def test_next_leader_continues(
    operators: tuple[Operator, Operator], operator: Operator, create: Callable[..., Scaled]
) -> None:
    """The leader is killed while endpoints grow, go to zero, and are at zero."""
    one_by_one = {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 3}]}
    growing = create("growing", maxReplicas=9, behavior={**AT_ONCE, "scaleUp": one_by_one})
    draining, sleeping = (create(name, minReplicas=0, idleSecondsToZero=1) for name in ("draining", "sleeping"))
    sleeping.settle(1)
    sleeping.go_to_zero()
    for each in (growing, draining):
        each.settle(1)
    before = {each.name: each.changes() for each in (growing, draining, sleeping)}
    drain_id_at_zero = sleeping.status()["drain"]
    _, other = operators
    other.start()
    old_drain_id = wait_for(lambda: draining.status().get("drain"), "it drains")
    growing.report(0, in_flight=8)  # needs four replicas

    def grows() -> bool:
        growing.serves(2)  # marks its pods as ready; on a slow machine there may be more of them already
        return growing.count() >= 2

    wait_for(grows, "it grows")
    assert operator.process
    operator.process.send_signal(signal.SIGKILL)
    operator.process.wait()
    operator.process = None
    draining.acknowledge(drain_id=old_drain_id)

    def is_whole() -> bool:
        growing.serves(4)
        return growing.count() >= 4

    wait_for(is_whole, "the next leader continues")
    wait_for(lambda: draining.status().get("drain") not in (None, "", old_drain_id), "it drains again")
    wait_polls(growing.gateway.replicas[0])
    growing.settle(4)
    assert growing.changes() == before["growing"] + 3  # one at a time, and none too many
    assert (draining.count(), draining.changes()) == (1, before["draining"])
    assert (sleeping.count(), sleeping.changes()) == (0, before["sleeping"])
    assert (sleeping.phase(), sleeping.status()["drain"]) == ("Zero", drain_id_at_zero)
    draining.go_to_zero()
    sleeping.report(1, held=1)
    sleeping.settle(1)
    other.stop()
