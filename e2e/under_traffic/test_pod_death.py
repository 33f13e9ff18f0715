"""Deaths of model pods under continuous traffic.

Asserted: a graceful deletion of a pod fails no request. If an engine is killed, only requests in flight on its pod
fail, at once; its server restarts it, and new requests wait meanwhile. If an engine freezes, its health check notices,
the pod gets no more traffic, and the kubelet restarts it. The other pod serves all the time.
"""

from __future__ import annotations

import os
import time

import pytest
from kit.cluster import Cluster, Images, Object
from kit.endpoint import Endpoint
from kit.results import Results
from kit.traffic import listed, traffic
from kit.waiting import wait_for

#: Time until no Service routes to an ended container, in seconds: the kubelet checks every second, then the endpoints
#: and every node's rules are updated. If a node's rules can be read, they are checked instead.
HEARSAY = 6


def busy_pod(endpoint: Endpoint) -> Object:
    """Return a pod of the endpoint."""
    return endpoint.pods()[0]


def leads_to(cluster: Cluster, node: str, address: str) -> bool:
    """Return whether a Service on this node routes to this address; also False if the node's rules cannot be read."""
    if "E2E_KUBECONFIG" in os.environ:
        return False
    return f" {address}:" in cluster.on_node(node, "iptables-save", "-t", "nat")


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_graceful_deletion_costs_no_request(
    endpoint: Endpoint, images: Images, results: Results, namespace: str
) -> None:
    url = endpoint.wait_ready()["url"]
    with traffic(endpoint.cluster, namespace, images.client, url) as flow:
        pod = busy_pod(endpoint)["metadata"]["name"]
        began = time.monotonic()
        endpoint.cluster.kubectl("delete", "pod", pod, "--namespace", namespace)
        wait_for(lambda: len(endpoint.serving()) == 2, "two pods serve again", 180)
        recovery = time.monotonic() - began
        flow.wait_for(10)
    results.add("pod deleted", flow.result, recovery)
    flow.result.unbroken()


@pytest.mark.timeout(1200)
def test_killed_engine_costs_only_its_requests(
    endpoint: Endpoint, images: Images, results: Results, namespace: str
) -> None:
    url = endpoint.wait_ready()["url"]
    lives = endpoint.lives()
    with traffic(endpoint.cluster, namespace, images.client, url, workers=3) as flow:
        pod = busy_pod(endpoint)["metadata"]["name"]
        endpoint.signal_engine(pod, "SIGKILL")
        struck = time.time()
        log = ("logs", pod, "--namespace", namespace, "--since=5m")
        wait_for(lambda: "serving again" in endpoint.cluster.kubectl(*log), "the engine is loaded again", 180)
        loaded = time.time()
        wait_for(lambda: len(endpoint.serving()) == 2, "two pods serve again", 60)
        recovery = time.time() - struck
        flow.wait_for(10)
    results.add("engine SIGKILLed", flow.result, recovery)
    broken = flow.result.broken
    assert len(broken) <= 3, listed(broken)
    # They do not wait until the engine is loaded again.
    late = [each for each in broken if each.start >= struck or each.end >= loaded]
    assert not late, f"struck at {struck}\n{listed(late)}"
    assert endpoint.lives() == lives  # the pod was neither replaced nor restarted


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_frozen_engine_costs_only_its_requests(
    endpoint: Endpoint, images: Images, results: Results, namespace: str
) -> None:
    url = endpoint.wait_ready()["url"]
    lives = endpoint.lives()
    with traffic(endpoint.cluster, namespace, images.client, url) as flow:
        pod = busy_pod(endpoint)
        node = endpoint.cluster.get("pod", flow.pod, "--namespace", namespace)["spec"]["nodeName"]
        address = pod["status"]["podIP"]
        readable = leads_to(endpoint.cluster, node, address)
        frozen = time.time()
        endpoint.signal_engine(pod["metadata"]["name"], "SIGSTOP")
        wait_for(lambda: len(endpoint.serving()) == 1, "the frozen pod gets no more traffic", 30)
        noticed = time.time() - frozen
        if readable:
            wait_for(lambda: not leads_to(endpoint.cluster, node, address), "the client's node has the change", 60)
        heard = time.time() + (0 if readable else HEARSAY)
        wait_for(lambda: endpoint.lives()[pod["metadata"]["uid"]] > lives[pod["metadata"]["uid"]], "a restart", 120)
        wait_for(lambda: len(endpoint.serving()) == 2, "two pods serve again", 180)
        recovery = time.time() - frozen
        flow.wait_for(10)
    results.add(f"engine frozen (noticed after {noticed:.0f} s)", flow.result, recovery)
    late = [each for each in flow.result.broken if each.start >= heard]
    assert not late, f"frozen at {frozen}, heard of at {heard}\n{listed(late)}"
    assert set(endpoint.lives()) == set(lives)
