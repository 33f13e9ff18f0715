"""An endpoint scaled between zero and three pods; clients do not retry.

Asserted: a burst at zero is held, starts pods and is answered; then the pods are removed. Requests are answered at any
moment and in each phase of the way to zero, while pods are removed, after a restart of all operators and gateways at
zero, while the operators are killed, and while a gateway replica does not report, which also keeps all pods. If pods
cannot start, requests are answered with the reason.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit import chart as release
from kit import hub as hubs
from kit.cluster import Cluster, Images
from kit.endpoint import Endpoint
from kit.namespace import fresh
from kit.results import Results
from kit.tiny import tiny, tiny_llama
from kit.traffic import client_pod
from kit.waiting import wait_for

from .conftest import URL
from .test_disturbances import gateway_pods

_CLIENT = Path(__file__).with_name("burst_client.py")
#: Idle time before the way to zero, in seconds; the drain and the end of pods follow.
_IDLE_S = 4
#: Time for a pod with a tiny model to start while others start, in seconds.
_START_S = 240
#: Last line of Python's output if it does not find its standard library.
_LAST_WORDS = "No module named 'encodings'"


@dataclass(frozen=True)
class Answer:
    """Result of a request; see `burst_client.py`."""

    number: int
    start: float
    end: float
    status: int
    held: float
    error: str


@pytest.fixture(scope="module")
def scaled(
    cluster: Cluster, images: Images, gateway: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    """An endpoint with scaling, of a model that loads in seconds."""
    with fresh(cluster, "scaled") as namespace:
        cluster.kubectl("label", "namespace", namespace, "stoker.dev/gateway=enabled")
        hub = hubs.start(cluster, namespace, images.client, tiny_llama(tmp_path_factory.mktemp("model")))
        document = tiny(hub.url, "scaled")
        document["spec"]["model"]["servedNames"] = ["scaled"]
        document["spec"]["scaling"] = {
            "minReplicas": 0,
            "maxReplicas": 3,
            "target": 2,
            "idleSecondsToZero": _IDLE_S,
            "holdSeconds": 400,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
        }
        endpoint = Endpoint(cluster, namespace, "scaled")
        endpoint.apply(document)
        wait_zero(endpoint)
        yield endpoint


@pytest.fixture
def namespace(scaled: Endpoint) -> str:
    """The namespace that is shown when a test fails."""
    return scaled.namespace


def phase(endpoint: Endpoint) -> str:
    return str(endpoint.get().get("status", {}).get("scaling", {}).get("phase", ""))


def wait_zero(endpoint: Endpoint) -> None:
    """Wait until it has no pods, including terminating ones."""

    def is_zero() -> bool:
        selector = ("-l", "app.kubernetes.io/instance=scaled", "--namespace", endpoint.namespace)
        return phase(endpoint) == "Zero" and not endpoint.cluster.get("pods", *selector)["items"]

    wait_for(is_zero, "it is scaled to zero", _START_S + 180)  # the first time, its first pod has to start before


def burst_command(key: str, times: list[float], tokens: int) -> list[str]:
    return ["python", "-c", _CLIENT.read_text(), URL, key, "scaled", str(tokens), *map(str, times)]


def read_answers(lines: str, times: list[float]) -> list[Answer]:
    answers = sorted((Answer(**json.loads(line)) for line in lines.strip().split("\n")), key=lambda each: each.number)
    assert len(answers) == len(times)
    return answers


@contextmanager
def burst(endpoint: Endpoint, images: Images, key: str, times: list[float], tokens: int = 8) -> Iterator[list[Answer]]:
    """Send requests at these seconds from the start of the block; the list has their results after it."""
    cluster, name = endpoint.cluster, f"burst-{uuid.uuid4().hex[:6]}"
    cluster.apply(endpoint.namespace, client_pod(name, images.client, burst_command(key, times, tokens)))
    where = ("--namespace", endpoint.namespace)
    answers: list[Answer] = []

    def pod_phase() -> str:
        return str(cluster.get("pod", name, *where)["status"]["phase"])

    try:
        wait_for(lambda: pod_phase() != "Pending", "the client has started", _START_S)
        yield answers
        wait_for(lambda: pod_phase() in ("Succeeded", "Failed"), "all requests have ended", _START_S + max(times))
        answers += read_answers(cluster.kubectl("logs", name, *where), times)
    finally:
        cluster.kubectl("delete", "pod", name, *where, "--grace-period=1", "--wait=false")


def burst_in_phase(endpoint: Endpoint, client: str, key: str, expected: str, times: list[float]) -> list[Answer]:
    """Send requests at these seconds from when the status first shows the phase `expected`; return their results.

    Args:
        client: running pod with the client's image.
    """
    environment, where = os.environ | endpoint.cluster.environment, ("--namespace", endpoint.namespace)
    look = ("get", "inferenceendpoint", endpoint.name, "--watch", "-o", "jsonpath={.status.scaling.phase}{'\\n'}")
    run = ("exec", "--stdin", client, "--", *burst_command(key, times, tokens=8))
    with (
        subprocess.Popen(
            ["kubectl", *where, *run], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as requests,
        subprocess.Popen(["kubectl", *where, *look], env=environment, stdout=subprocess.PIPE, text=True) as phases,
    ):
        try:
            assert phases.stdout
            assert any(line.strip() == expected for line in phases.stdout), f"never {expected}"
            lines, _ = requests.communicate("begin\n", timeout=_START_S + max(times))
        finally:
            phases.terminate()
            requests.terminate()
    return read_answers(lines, times)


def all_answered(answers: list[Answer]) -> None:
    wrong = [each for each in answers if each.status != 200 or each.error]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.timeout(1200)
def test_burst_at_zero_is_answered(scaled: Endpoint, images: Images, results: Results, key: str) -> None:
    wait_zero(scaled)
    with burst(scaled, images, key, [each * 0.05 for each in range(12)], tokens=200) as answers:
        pods = wait_for(lambda: len(scaled.pods()) == 3 and scaled.pods(), "three pods", 120)
        assert scaled.get()["spec"]["replicas"] == 1  # the default: no autoscaler writes it
    all_answered(answers)
    assert min(each.held for each in answers) > 0
    first = min(each.end for each in answers) - answers[0].start
    results.add(f"scaling: 12 requests at zero, {len(pods)} pods", recovery=first)
    began = time.monotonic()
    wait_zero(scaled)
    results.add("scaling: back to zero", recovery=time.monotonic() - began)


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_requests_at_any_moment_of_scaling_to_zero_are_answered(scaled: Endpoint, images: Images, key: str) -> None:
    rng, times = random.Random(7), [0.0]
    for _ in range(8):  # from before the drain to after the end of the last pod
        times.append(times[-1] + rng.uniform(_IDLE_S - 1, _IDLE_S + 12))
    with burst(scaled, images, key, times) as answers:
        pass
    all_answered(answers)


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_requests_at_zero_survive_restarts_of_operator_and_gateway(scaled: Endpoint, images: Images, key: str) -> None:
    wait_zero(scaled)
    cluster = scaled.cluster
    for name in (release.RELEASE, "stoker-gateway"):
        cluster.kubectl("rollout", "restart", f"deployment/{name}", "--namespace", release.SYSTEM)
        cluster.kubectl("rollout", "status", f"deployment/{name}", "--namespace", release.SYSTEM, "--timeout=180s")
    assert phase(scaled) == "Zero"
    with burst(scaled, images, key, [0.0, 1.0, 2.0]) as answers:
        wait_for(lambda: scaled.pods(), "a pod", 120)
        for name in release.operator_pods(cluster):
            cluster.kubectl("delete", "pod", name, "--namespace", release.SYSTEM, "--grace-period=0", "--force")
    all_answered(answers)


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_failed_start_is_returned_to_held_requests(scaled: Endpoint, images: Images, key: str) -> None:
    wait_zero(scaled)
    scaled.patch(engine={"image": "stoker/no-such-image:1"})
    try:
        with burst(scaled, images, key, [0.0, 0.5, 1.0]) as answers:
            pass
    finally:
        scaled.patch(engine={"image": None})
    for each in answers:
        assert each.status == 503 and "no-such-image" in each.error, answers
    with burst(scaled, images, key, [0.0]) as answers:
        pass
    all_answered(answers)


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_crashing_start_is_returned_to_held_requests(scaled: Endpoint, images: Images, key: str) -> None:
    wait_zero(scaled)
    env = scaled.get()["spec"]["engine"]["env"]
    scaled.patch(engine={"env": [*env, {"name": "PYTHONHOME", "value": "/nowhere"}]})
    try:
        # The later requests arrive while the pod waits for its restart, and at zero.
        with burst(scaled, images, key, [0.0, 0.2, 0.4, 10.0, 25.0, 40.0]) as answers:
            pass
    finally:
        scaled.patch(engine={"env": env})
    for each in answers:
        assert each.status == 503 and _LAST_WORDS in each.error, "\n".join(map(str, answers))
    with burst(scaled, images, key, [0.0]) as answers:
        pass
    all_answered(answers)


@pytest.mark.further
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("expected", ["Draining", "Zero"])
def test_burst_in_each_phase_of_scaling_to_zero_is_answered(
    scaled: Endpoint, images: Images, results: Results, key: str, expected: str
) -> None:
    cluster, name = scaled.cluster, f"burst-{uuid.uuid4().hex[:6]}"
    where = ("--namespace", scaled.namespace)
    cluster.apply(scaled.namespace, client_pod(name, images.client, ["sleep", "infinity"]))
    try:
        cluster.kubectl("wait", "--for=condition=Ready", f"pod/{name}", *where, "--timeout=120s")
        with burst(scaled, images, key, [0.0]) as answers:
            pass
        all_answered(answers)
        answers = burst_in_phase(scaled, name, key, expected, [0.02 * each for each in range(24)])
    finally:
        cluster.kubectl("delete", "pod", name, *where, "--grace-period=1", "--wait=false")
    all_answered(answers)
    held = sum(each.held > 0 for each in answers)
    results.add(
        f"scaling: 24 requests from the phase {expected} on, {held} held",
        recovery=max(a.end for a in answers) - answers[0].start,
    )


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_bursts_while_pods_are_removed_are_answered(scaled: Endpoint, images: Images, key: str) -> None:
    scaling = scaled.get()["spec"]["scaling"]
    scaled.patch(scaling={"minReplicas": 3, "idleSecondsToZero": None})
    try:
        wait_for(lambda: len(scaled.serving()) == 3, "three pods serve", _START_S)
        # Eight at a time: more than one pod's target, but answered soon.
        times = [2.0 * group + 0.01 * each for group in range(30) for each in range(8)]
        with burst(scaled, images, key, times) as answers:
            scaled.patch(scaling={"minReplicas": 1})
            wait_for(lambda: len(scaled.pods()) == 1, "two pods are removed", 120)
            removed = time.time()
        all_answered(answers)
        late = [each for each in answers if each.start > removed]
        assert 0 < len(late) < len(answers), "some came before and some after"
    finally:
        scaled.patch(scaling=scaling)


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_silent_gateway_replica_keeps_the_count(scaled: Endpoint, images: Images, key: str) -> None:
    cluster, pod = scaled.cluster, gateway_pods(scaled.cluster)[0]
    rule = ("FORWARD", "--destination", pod["status"]["podIP"], "--protocol", "tcp", "--dport", "8081", "-j", "DROP")
    nodes = [each["metadata"]["name"] for each in cluster.get("nodes")["items"]]
    scaling = scaled.get()["spec"]["scaling"]
    scaled.patch(scaling={"minReplicas": 3, "idleSecondsToZero": None})
    try:
        wait_for(lambda: len(scaled.serving()) == 3, "three pods serve", _START_S)
        for node in nodes:
            cluster.on_node(node, "iptables", "--insert", *rule)
        scaled.wait_reason("MissingSignals", "Scaling", "Unknown")
        scaled.patch(scaling=scaling)
        with burst(scaled, images, key, [each * 0.5 for each in range(60)]) as answers:
            pass
        all_answered(answers)
        # These requests need one pod; only the missing report keeps the others.
        assert scaled.condition("Scaling")["reason"] == "MissingSignals"
        assert (len(scaled.pods()), phase(scaled)) == (3, "Active")
    finally:
        scaled.patch(scaling=scaling)
        for node in nodes:
            cluster.on_node(node, "iptables", "--delete", *rule, check=False)
    wait_zero(scaled)
