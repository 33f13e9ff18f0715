"""Kills the operator before and after each of its writes, while it creates, reports, changes and shrinks an endpoint.

Afterwards the cluster is in the same state as without kills: nothing is written or created twice, no Deployment has an
extra revision, and objects deleted meanwhile stay deleted.

Endpoints in separate namespaces go through the same phases. In each phase, the operator of the first endpoint runs
undisturbed and shows which writes there are; the operator of each other endpoint dies at one of these writes. Then one
operator runs for all namespaces.

A death may cost one thing: the Event that accompanies a status is not repeated by the next operator.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from apiserver import free_ports

sys.path.insert(0, str(Path(__file__).parent))

from crashing_operator import Death, Life

SYSTEM = "stoker-system"
#: API paths of the kinds that exist for an endpoint, including the endpoint and its pods.
KINDS = {
    "InferenceEndpoint": "/apis/stoker.dev/v1alpha1/inferenceendpoints",
    "ServiceAccount": "/api/v1/serviceaccounts",
    "PersistentVolumeClaim": "/api/v1/persistentvolumeclaims",
    "Service": "/api/v1/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1/poddisruptionbudgets",
    "Deployment": "/apis/apps/v1/deployments",
    "PodMonitor": "/apis/monitoring.coreos.com/v1/podmonitors",
    "ReplicaSet": "/apis/apps/v1/replicasets",
    "Pod": "/api/v1/pods",
}
#: Fields that differ between equal objects of different namespaces.
OWN = {
    "resourceVersion", "creationTimestamp", "lastTransitionTime", "lastUpdateTime", "time", "clusterIP", "clusterIPs",
}  # fmt: skip
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TOGETHER = 6  # concurrent operators
MOST_LATER = 10  # largest number of deaths in a later phase
CACHE = {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": 1}}}}}
WHOLE = {"replicas": 2, "storage": {"cache": CACHE}}


class Phase(NamedTuple):
    """A change of an endpoint without a running operator, and the expected result of the next operator.

    Attributes:
        act: makes the change in a namespace.
        reason: reason of the endpoint's Ready condition afterwards.
        writes: kinds of writes that the operator makes.
    """

    name: str
    act: Callable[[str], None]
    reason: str
    writes: set[str]


class Cast:
    """The endpoints and their operators."""

    def __init__(self, kube: Any, operator: Any, eventually: Any, document: Any, folder: Path) -> None:
        self.kube, self.operator, self.eventually, self.document = kube, operator, eventually, document
        self.folder = folder
        self.namespaces: list[str] = []

    def phases(self) -> Iterator[Phase]:
        """Yield the phases in order."""
        up = {
            "apply ServiceAccount", "apply PersistentVolumeClaim", "apply Service", "apply NetworkPolicy",
            "apply PodDisruptionBudget", "apply Deployment", "apply PodMonitor",
        }  # fmt: skip
        report_writes = {"apply InferenceEndpoint/status", "create Event"}
        port = {"containerPort": 9000, "name": "more", "protocol": "TCP"}
        other_pods = {"template": {"spec": {"containers": [{"name": "engine", "ports": [port]}]}}}
        yield Phase("brought up", self.create, "RollingOut", up | report_writes)
        yield Phase("ready", self.serve, "Ready", report_writes)
        changes = {"apply Service", "apply NetworkPolicy", "apply Deployment"}
        change = {"service": {"port": 9000}, "networkPolicy": {"mode": "Open"}, **other_pods}
        yield Phase("changed", lambda ns: self.kube.patch(ns, "demo", change), "RollingOut", changes | report_writes)
        less = {"replicas": 1, "monitoring": {"podMonitor": "Disabled"}, "networkPolicy": {"mode": "None"}}
        removals = {"apply Deployment", "delete PodDisruptionBudget", "delete PodMonitor", "delete NetworkPolicy"}
        status = {"apply InferenceEndpoint/status"}
        yield Phase("shrunk", lambda ns: self.kube.patch(ns, "demo", less), "RollingOut", removals | status)

    def create(self, ns: str) -> None:
        self.kube.create(ns, self.document(**WHOLE))

    def serve(self, ns: str) -> None:
        """Act as the kubelet until the Deployment has rolled out."""

        def rolled_out() -> bool:
            for pod in self.kube.pods(ns, "demo"):
                if pod.status.phase == "Pending":
                    self.kube.mark_ready(ns, pod.metadata.name)
            live = self.kube.apps.read_namespaced_deployment("demo", ns)
            counts = {live.status.replicas, live.status.updated_replicas, live.status.available_replicas}
            return counts == {live.spec.replicas} and live.status.observed_generation == live.metadata.generation

        self.eventually(rolled_out, f"{ns} has rolled out", timeout=60)

    def live(self, ns: str, death: Death | None = None, *options: str) -> Life:
        """Start an operator for one namespace."""
        return Life(self.operator.kubeconfig, ns, self.folder / f"{uuid.uuid4().hex}.log", death, options)

    @contextmanager
    def left_alone(self, ns: str, phase: Phase) -> Iterator[list[str]]:
        """Run an operator without disturbance, and yield its writes.

        It runs until the end of the block: later writes are possible, because its first status may describe pods that
        its Deployment does not have yet.
        """
        life = self.live(ns)

        def is_done() -> bool:
            assert not life.died(), life.log.read_text()
            # A write is recorded after its response, and may be visible before that.
            reason = self.kube.condition(ns, "demo").get("reason")
            return bool(reason == phase.reason and phase.writes <= set(life.writes))

        try:
            self.eventually(is_done, f"{ns} is {phase.name}", timeout=180)
            yield life.writes
        finally:
            life.kill()

    def die(self, deaths: Iterable[tuple[str, Death]]) -> None:
        """Run an operator per namespace until it dies as given."""
        due = list(deaths)
        for first in range(0, len(due), TOGETHER):
            lives = [self.live(*each) for each in due[first : first + TOGETHER]]
            try:
                for life in lives:
                    assert life.died(180), (
                        f"the operator is alive, but should have died {life.death}:\n{life.log.read_text()}"
                    )
            finally:
                for life in lives:
                    life.kill()

    def fill(self, count: int) -> None:
        """Create namespaces until there are `count`."""
        while len(self.namespaces) < count:
            self.namespaces.append(f"mortal-{uuid.uuid4().hex[:8]}")
            self.kube.core.create_namespace({"metadata": {"name": self.namespaces[-1]}})

    def keep(self, count: int) -> None:
        """Delete all but the first `count` namespaces with their contents."""
        while len(self.namespaces) > count:
            self.kube.core.delete_namespace(self.namespaces.pop())

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the objects of each namespace, without the fields in `OWN`."""
        found: dict[str, dict[str, Any]] = {ns: {} for ns in self.namespaces}
        for kind, path in KINDS.items():
            for live in self.kube.get(path)["items"]:
                ns = live["metadata"]["namespace"]
                if ns not in found or (kind == "ServiceAccount" and live["metadata"]["name"] == "default"):
                    continue
                if kind in ("ReplicaSet", "Pod"):
                    version = live["metadata"]["labels"]["pod-template-hash"]
                    found[ns].setdefault(kind, Counter())[version] += live.get("status", {}).get("readyReplicas", 1)
                else:
                    found[ns].setdefault(kind, []).append(plain(kind, live, ns))
        return found

    def alike(self) -> bool:
        """Return whether all namespaces have the same state."""
        first, *rest = self.state().values()
        return all(each == first for each in rest)

    def writes(self) -> dict[str, Counter[str]]:
        """Count writes per namespace by verb and resource, even without effect, except of endpoints and Events."""
        counts: dict[str, Counter[str]] = {ns: Counter() for ns in self.namespaces}
        for event in self.kube.server.requests():
            about = event.get("objectRef", {})
            if event["verb"] not in ("create", "update", "patch", "delete") or "dryRun=" in event["requestURI"]:
                continue
            if about.get("namespace") in counts and about["resource"] not in ("inferenceendpoints", "events"):
                counts[about["namespace"]][f"{event['verb']} {about['resource']}"] += 1
        return counts

    def events(self) -> dict[str, Counter[str]]:
        """Count the Events about each namespace's endpoint."""
        counts: dict[str, Counter[str]] = {ns: Counter() for ns in self.namespaces}
        for event in self.kube.get("/api/v1/events")["items"]:
            ns = event["metadata"]["namespace"]
            if ns in counts and event["involvedObject"]["kind"] == "InferenceEndpoint":
                counts[ns][event["reason"]] += 1
        return counts


def plain(kind: str, live: Any, ns: str) -> Any:
    """Return an object without the fields in `OWN`, and with only the operator's managedFields."""
    metadata = live["metadata"]
    metadata["managedFields"] = [each for each in metadata["managedFields"] if each["manager"] == "stoker"]
    if kind == "Deployment":
        live["status"].pop("conditions", None)  # written by its controller, dependent on timing
    text = UID.sub("UID", json.dumps(live).replace(ns, "NAMESPACE"))
    return json.loads(text, object_hook=lambda each: {key: each[key] for key in each.keys() - OWN})


def differences(expected: Any, there: Any, path: str = "") -> Iterator[str]:
    """Yield the differences from `expected`, part by part."""
    if isinstance(expected, dict) and isinstance(there, dict):
        for key in expected.keys() | there.keys():
            yield from differences(expected.get(key), there.get(key), f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(there, list) and len(expected) == len(there):
        for index, (one, other) in enumerate(zip(expected, there, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif expected != there:
        yield f"{path}: {there!r} instead of {expected!r}"


@pytest.fixture
def cast(
    kube: Any, sleeping_operator: Any, pod_monitors: None, eventually: Any, document: Any, tmp_path: Path
) -> Iterator[Cast]:
    sleeping_operator.stop()
    cast = Cast(kube, sleeping_operator, eventually, document, tmp_path)
    yield cast
    for ns in cast.namespaces:
        kube.core.delete_namespace(ns)
    for log in tmp_path.glob("*.log"):
        logged = log.read_text()
        assert "Traceback" not in logged, logged
        assert '" cannot ' not in logged, logged


@pytest.mark.timeout(600)
def test_state_after_a_kill_at_any_write_equals_the_undisturbed_one(cast: Cast, eventually: Any) -> None:
    cast.fill(1)
    alone = cast.namespaces[0]
    for phase in cast.phases():
        began = time.monotonic()
        phase.act(alone)
        with cast.left_alone(alone, phase) as writes:
            deaths = [Death(moment, write) for write in dict.fromkeys(writes) for moment in ("before", "after")]
            if phase.name == "brought up":
                cast.fill(1 + len(deaths))
            else:
                cast.keep(1 + MOST_LATER)
            killed_namespaces = cast.namespaces[1:]
            named = dict(zip(killed_namespaces, deaths, strict=False))
            assert len(named) == len(deaths)
            with ThreadPoolExecutor(TOGETHER) as threads:
                list(threads.map(phase.act, killed_namespaces))
            cast.die(named.items())

        cast.operator.start()
        with suppress(AssertionError):
            eventually(cast.alike, "all namespaces have the same state", timeout=180)
        cast.operator.stop()
        state, counts, events = cast.state(), cast.writes(), cast.events()
        for ns in killed_namespaces:
            assert not list(differences(state[alone], state[ns])), (phase.name, named.get(ns))
            assert counts[ns] == counts[alone], (phase.name, named.get(ns))
            assert events[ns] <= events[alone], (phase.name, named.get(ns))
        print(f"{phase.name}: {len(deaths)} deaths, {time.monotonic() - began:.1f} s")


@pytest.mark.timeout(300)
def test_half_created_endpoint_stays_deleted(cast: Cast, eventually: Any) -> None:
    (up, *_) = cast.phases()
    deaths = [Death("after", write) for write in sorted(up.writes)]
    cast.fill(len(deaths))
    for ns in cast.namespaces:
        cast.create(ns)
    cast.die(zip(cast.namespaces, deaths, strict=True))
    before = cast.writes()
    assert all(before.values())
    for ns in cast.namespaces:
        cast.kube.delete(ns, "demo")
    cast.operator.start()
    nothing: dict[str, Any] = {ns: {} for ns in cast.namespaces}
    # The garbage collector discovers new kinds every 30 s.
    eventually(lambda: cast.state() == nothing, "nothing is left", timeout=120)
    time.sleep(2)  # sleeps: there is no event for the absence of writes
    assert cast.state() == nothing
    assert cast.writes() == before


@pytest.mark.timeout(300)
def test_operator_that_dies_after_each_write_still_converges(cast: Cast, eventually: Any) -> None:
    """Each operator dies after its first write; the next one continues from there."""
    cast.fill(2)
    alone, mortal = cast.namespaces
    cast.create(alone)
    (up, *_) = cast.phases()
    with cast.left_alone(alone, up) as writes:
        cast.create(mortal)
        lives = 0
        while True:
            life = cast.live(mortal, Death("after"))
            try:
                eventually(
                    lambda life=life: life.died() or cast.alike(),
                    "it writes, or nothing is left to write",
                    timeout=120,
                )
                if not life.died(1):
                    break
            finally:
                life.kill()
            lives += 1
            assert lives <= 2 * len(writes)
    assert lives >= len({write for write in writes if write != "create Event"})
    counts = cast.writes()
    assert counts[mortal] == counts[alone]
    assert cast.alike()


@pytest.mark.timeout(300)
def test_certificate_is_created_and_announced_despite_kills(cast: Cast, configuration: Any, eventually: Any) -> None:
    """An operator also writes its webhook's certificate, and the CA bundle for the API server."""
    cast.fill(1)
    (ns,) = cast.namespaces
    (port,) = free_ports(1)
    options = [
        f"--operator-namespace={SYSTEM}", f"--webhook-address=127.0.0.1:{port}", "--webhook-secret=stoker-webhook",
        "--webhook-configuration=stoker", "--webhook-host=127.0.0.1",
    ]  # fmt: skip

    def is_trusted() -> bool:
        bundle = configuration.bundle()
        secret = cast.kube.core.read_namespaced_secret("stoker-webhook", SYSTEM)
        if not bundle or bundle != (secret.data or {}).get("ca.crt"):
            return False
        trusting = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
        address = ("127.0.0.1", port)
        with suppress(OSError), socket.create_connection(address, timeout=5) as connection:  # limit: of a repeated look
            trusting.wrap_socket(connection, server_hostname="127.0.0.1").close()
            return True
        return False

    for write in ("replace Secret", "patch ValidatingWebhookConfiguration"):
        for moment in ("before", "after"):
            cast.kube.core.patch_namespaced_secret("stoker-webhook", SYSTEM, {"data": None})
            configuration.forget()
            mortal = cast.live(ns, death := Death(moment, write), *options)
            try:
                assert mortal.died(180), mortal.log.read_text()
            finally:
                mortal.kill()
            next_one = cast.live(ns, None, *options)
            try:
                eventually(is_trusted, f"its certificate is trusted, after one had died {death}", timeout=180)
            finally:
                next_one.kill()
