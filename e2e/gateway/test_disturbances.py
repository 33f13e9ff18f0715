"""Effects of changes and crashes on the gateway's clients.

The gateway has two replicas, the model two pods; clients do not retry. Asserted: a rolling update of the model, a
drained node, the deletion of a gateway pod and the death of the operator fail no request. If a pod of the model is
killed or its engine freezes, only its running requests break off. If a pod of the gateway is killed, only requests
through it break off. If pickers are killed, no response breaks off.
"""

from __future__ import annotations

import time

import pytest
from kit import chart as release
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint
from kit.results import Results
from kit.traffic import listed, traffic
from kit.waiting import wait_for

from .conftest import URL

#: Longest time until all senders know that a pod accepts no more traffic, in seconds.
HEARSAY = 3

#: Kills a gateway's pickers, and prints their number.
KILL_PICKER = """
import os, pathlib, signal
found = []
for each in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        if int(each.parent.name) != os.getpid() and b"stoker_gateway.cli.picker" in each.read_bytes():
            found.append(int(each.parent.name))
    except OSError:
        pass
for pid in found:
    os.kill(pid, signal.SIGKILL)
print(len(found))
"""


def gateway_pods(cluster: Cluster) -> list[Object]:
    selector = ("-l", "app.kubernetes.io/name=stoker-gateway", "--namespace", release.SYSTEM)
    items = cluster.get("pods", *selector)["items"]
    return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]


def ready_gateways(cluster: Cluster) -> int:
    return sum(
        each["type"] == "Ready" and each["status"] == "True"
        for pod in gateway_pods(cluster)
        for each in pod["status"].get("conditions", ())
    )


@pytest.mark.timeout(1200)
def test_changes_cost_no_request(endpoint: Endpoint, images: Images, results: Results, key: str) -> None:
    cluster = endpoint.cluster
    endpoint.wait_ready()
    with traffic(cluster, endpoint.namespace, images.client, URL, api_key=key) as flow:
        began, before = time.monotonic(), set(endpoint.lives())
        endpoint.patch(engine={"maxNumSeqs": 8})
        endpoint.wait_ready(420)
        assert not before & set(endpoint.lives())
        flow.wait_for(5)
        deleted_pod = gateway_pods(cluster)[0]["metadata"]["name"]
        cluster.kubectl("delete", "pod", deleted_pod, "--namespace", release.SYSTEM)
        wait_for(lambda: ready_gateways(cluster) == 2, "two gateways are ready", 120)
        for name in release.operator_pods(cluster):
            cluster.kubectl("delete", "pod", name, "--namespace", release.SYSTEM, "--grace-period=0", "--force")
        recovery = time.monotonic() - began
        flow.wait_for(10)
    results.add("gateway: rolling update, a gateway ends, operators killed", flow.result, recovery)
    flow.result.unbroken()


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_killed_pod_interrupts_only_its_requests(
    endpoint: Endpoint, images: Images, results: Results, key: str
) -> None:
    endpoint.wait_ready()
    with traffic(endpoint.cluster, endpoint.namespace, images.client, URL, workers=3, api_key=key) as flow:
        pod = endpoint.pods()[0]["metadata"]["name"]
        struck = time.time()
        endpoint.cluster.kubectl("delete", "pod", pod, "--namespace", endpoint.namespace, "--grace-period=0", "--force")
        wait_for(lambda: len(endpoint.serving()) == 2, "two pods serve again", 240)
        recovery = time.time() - struck
        flow.wait_for(10)
    results.add("gateway: a model's pod killed", flow.result, recovery)
    broken = flow.result.broken
    assert len(broken) <= 3 and not [each for each in broken if each.outcome == "failed"], listed(broken)


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_frozen_engine_interrupts_only_its_requests(
    endpoint: Endpoint, images: Images, results: Results, key: str
) -> None:
    endpoint.wait_ready()
    lives = endpoint.lives()
    with traffic(endpoint.cluster, endpoint.namespace, images.client, URL, workers=3, api_key=key) as flow:
        pod = endpoint.pods()[0]["metadata"]
        frozen = time.time()
        endpoint.signal_engine(pod["name"], "SIGSTOP")
        wait_for(lambda: len(endpoint.serving()) == 1, "the frozen pod gets no more traffic", 30)
        noticed = time.time()
        wait_for(lambda: endpoint.lives()[pod["uid"]] > lives[pod["uid"]], "a restart", 120)
        wait_for(lambda: len(endpoint.serving()) == 2, "two pods serve again", 180)
        recovery = time.time() - frozen
        flow.wait_for(10)
    results.add(f"gateway: engine frozen (noticed after {noticed - frozen:.0f} s)", flow.result, recovery)
    late = [each for each in flow.result.broken if each.start >= noticed + HEARSAY]
    assert not late, f"frozen at {frozen}, noticed at {noticed}\n{listed(late)}"
    assert len(flow.result.broken) <= 3, listed(flow.result.broken)
    assert set(endpoint.lives()) == set(lives)


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_drained_node_costs_no_request(endpoint: Endpoint, images: Images, results: Results, key: str) -> None:
    cluster = endpoint.cluster
    endpoint.wait_ready()
    node = endpoint.pods()[0]["spec"]["nodeName"]
    with traffic(cluster, endpoint.namespace, images.client, URL, api_key=key) as flow:
        began = time.monotonic()
        try:
            cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s", "--force")
            endpoint.wait_ready()
            wait_for(lambda: ready_gateways(cluster) == 2, "two gateways are ready", 120)
            assert node not in {each["spec"]["nodeName"] for each in [*endpoint.pods(), *gateway_pods(cluster)]}
        finally:
            cluster.kubectl("uncordon", node)
        recovery = time.monotonic() - began
        flow.wait_for(10)
    results.add("gateway: node drain", flow.result, recovery)
    flow.result.unbroken()


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_killed_gateway_interrupts_only_its_requests(
    endpoint: Endpoint, images: Images, results: Results, key: str
) -> None:
    cluster = endpoint.cluster
    with traffic(cluster, endpoint.namespace, images.client, URL, workers=3, api_key=key) as flow:
        pod = gateway_pods(cluster)[0]["metadata"]["name"]
        struck = time.time()
        cluster.kubectl("delete", "pod", pod, "--namespace", release.SYSTEM, "--grace-period=0", "--force")
        wait_for(lambda: ready_gateways(cluster) == 2, "two gateways are ready", 120)
        recovery = time.time() - struck
        flow.wait_for(10)
    results.add("gateway: one of two killed", flow.result, recovery)
    late = [each for each in flow.result.broken if each.start > struck + HEARSAY]  # the other gateway serves
    assert not late, listed(late)


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_killed_picker_interrupts_no_response(endpoint: Endpoint, images: Images, results: Results, key: str) -> None:
    cluster = endpoint.cluster
    endpoint.wait_ready()
    with traffic(cluster, endpoint.namespace, images.client, URL, workers=3, api_key=key) as flow:
        struck = time.time()
        for pod in gateway_pods(cluster):
            exec_in_pod = ("exec", "--namespace", release.SYSTEM, pod["metadata"]["name"], "--")
            assert cluster.kubectl(*exec_in_pod, "python3", "-c", KILL_PICKER).strip() == "1"
        wait_for(lambda: ready_gateways(cluster) == 2, "two gateways are ready", 120)
        recovered = time.time()
        recovery = recovered - struck
        flow.wait_for(10)
    results.add("gateway: both pickers killed", flow.result, recovery)
    assert not flow.result.cut, listed(flow.result.cut)
    # Requests that were being routed, or came before the next picker was ready, fail with 503.
    assert all("Error code: 503" in each.error for each in flow.result.failed), listed(flow.result.failed)
    unexcused = [each for each in flow.result.failed if not struck - 5 < each.start < recovered + HEARSAY]
    assert not unexcused, listed(unexcused)
