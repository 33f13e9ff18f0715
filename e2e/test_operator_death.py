"""After failures of the operator or the control plane everything is in its desired state, nothing exists twice, and no
model pod was restarted.

Asserted for: the operator killed at many moments of its work; a restart of the API server; a paused etcd; a webhook
that does not respond; a namespace deleted while no operator runs.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from kit import chart as release
from kit.chart import SYSTEM, operator_pods
from kit.cluster import Cluster, Images
from kit.controllers import controllers_live
from kit.endpoint import Endpoint, demo
from kit.results import Results
from kit.traffic import traffic
from kit.waiting import wait_for

#: Objects of an endpoint without a volume claim, in a cluster without Prometheus' resources. With more than one replica
#: it also has a PodDisruptionBudget.
CHILDREN = ("deployment", "service", "serviceaccount", "networkpolicy")


def kill_operator(cluster: Cluster) -> None:
    """Kill all pods of the operator at once, without grace period."""
    pods = operator_pods(cluster)
    cluster.kubectl("delete", "pods", *pods, "--namespace", SYSTEM, "--grace-period=0", "--force")


def scale_operator(cluster: Cluster, replicas: int) -> None:
    """Scale the operator to `replicas`, and wait for its pods."""
    in_namespace = ("--namespace", SYSTEM)
    cluster.kubectl("scale", "deployment/stoker", f"--replicas={replicas}", *in_namespace)
    if replicas:
        cluster.kubectl("rollout", "status", "deployment/stoker", "--timeout=120s", *in_namespace)
    else:
        # Terminating pods still answer webhook calls.
        pods = ("pods", "-l", "app.kubernetes.io/name=stoker-operator", *in_namespace)
        wait_for(lambda: not cluster.get(*pods)["items"], "the operator has ended", 90)


def complete(cluster: Cluster, namespace: str, name: str, *more: str) -> bool:
    """Return whether all objects of an endpoint exist, and its status describes its newest spec."""
    kinds = (*CHILDREN, *more)
    which = ("--namespace", namespace, "--field-selector", f"metadata.name={name}", "-o", "name")
    found = cluster.kubectl("get", ",".join(kinds), *which).split()
    return len(found) == len(kinds) and bool(Endpoint(cluster, namespace, name).condition())


def replica_sets(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """Return the ReplicaSets of the endpoints' Deployments, by endpoint."""
    sets: dict[str, Any] = {}
    for each in cluster.get("replicasets", "--namespace", namespace)["items"]:
        sets.setdefault(each["metadata"]["ownerReferences"][0]["name"], []).append(each["metadata"]["name"])
    return sets


@pytest.mark.timeout(600)
def test_operator_killed_at_any_moment_continues(
    cluster: Cluster, chart: None, namespace: str, results: Results
) -> None:
    """The endpoints need two pods on nodes that do not exist: their pods never start, which makes the test fast."""
    nowhere = {"spec": {"nodeSelector": {"nowhere": "at-all"}}}
    names = []
    began = time.monotonic()
    for number, moment in enumerate((0.0, 0.1, 0.2, 0.4, 0.8, 1.6)):
        names.append(f"at-{number}")
        cluster.apply(namespace, demo(names[-1], replicas=2, template=nowhere))
        time.sleep(moment)  # sleeps: moment of the kill
        kill_operator(cluster)
        # A change that no watch observes.
        Endpoint(cluster, namespace, names[-1]).patch(replicas=3)
        wait_for(lambda: operator_pods(cluster), "an operator is started", 60)
    wait_for(
        lambda: all(complete(cluster, namespace, name, "poddisruptionbudget") for name in names),
        "every endpoint has its objects",
        180,
    )
    results.add("operator killed 6 times", recovery=time.monotonic() - began)
    for name in names:
        assert cluster.get("deployment", name, "--namespace", namespace)["spec"]["replicas"] == 3
    assert all(len(each) == 1 for each in replica_sets(cluster, namespace).values())


@pytest.mark.further
@pytest.mark.timeout(1200)
def test_control_plane_failure_costs_no_request(
    cluster: Cluster, images: Images, chart: None, namespace: str, results: Results
) -> None:
    endpoint = Endpoint(cluster, namespace)
    endpoint.apply(demo(replicas=1))
    url = endpoint.wait_ready()["url"]
    lives = endpoint.lives()
    (node,) = (
        each["metadata"]["name"]
        for each in cluster.get("nodes", "-l", "node-role.kubernetes.io/control-plane")["items"]
    )

    def answers() -> bool:
        return cluster.kubectl("get", "--raw", "/readyz", "--request-timeout=2s", check=False) == "ok"

    def recovered() -> bool:
        """Return whether all objects exist, and the endpoint is ready with its newest spec."""
        return bool(endpoint.ready()) and complete(cluster, namespace, "demo")

    for disturbance, disturb in (
        ("operator killed", lambda: kill_operator(cluster)),
        ("API server killed", lambda: cluster.on_node(node, "pkill", "-KILL", "-f", "^kube-apiserver")),
        ("etcd paused for 20 s", lambda: pause_etcd(cluster, node)),
    ):
        with traffic(cluster, namespace, images.client, url) as flow:
            began = time.monotonic()
            disturb()
            struck = time.time()
            wait_for(answers, "the API server answers", 120)
            endpoint.patch(service={"annotations": {"example.com/after": disturbance.replace(" ", "-")}}, replicas=1)
            wait_for(
                lambda disturbance=disturbance: (
                    annotation(cluster, namespace) == disturbance.replace(" ", "-") and recovered()
                ),
                f"{disturbance}: a change arrives",
                180,
            )
            recovery = time.monotonic() - began
            wait_for(lambda struck=struck: controllers_live(cluster, struck), "the controllers are back", 180)
            flow.wait_for(10)
        results.add(disturbance, flow.result, recovery)
        flow.result.unbroken()
        assert endpoint.lives() == lives, disturbance
        assert len(replica_sets(cluster, namespace)["demo"]) == 1


def pause_etcd(cluster: Cluster, node: str) -> None:
    """Simulate a disk that does not respond."""
    cluster.on_node(node, "pkill", "-STOP", "-f", "^etcd")
    try:
        time.sleep(20)  # sleeps: duration of the disk's outage
    finally:
        cluster.on_node(node, "pkill", "-CONT", "-f", "^etcd")


def annotation(cluster: Cluster, namespace: str) -> str:
    """Return the Service's annotation ``example.com/after``; empty if it is missing."""
    service = cluster.get("service", "demo", "--namespace", namespace)
    value: str = service["metadata"].get("annotations", {}).get("example.com/after", "")
    return value


@pytest.mark.timeout(600)
def test_specs_are_accepted_and_deleted_without_an_operator(cluster: Cluster, chart: None, namespace: str) -> None:
    """Without an operator, the API server accepts specs that the webhook would refuse, and a deleted namespace goes
    away.

    Once an operator is back, it refuses such a spec in its status.
    """
    nowhere = {"spec": {"nodeSelector": {"nowhere": "at-all"}}}
    endpoint = Endpoint(cluster, namespace, "no-such-accelerator")
    document = demo(endpoint.name)
    document["spec"]["hardware"] = {"accelerator": "nvidia-a1000"}

    def is_refused() -> bool:
        if "nvidia-a1000" in cluster.apply(namespace, document, check=False):
            return not cluster.find("ie", endpoint.name, "--namespace", namespace)
        cluster.kubectl("delete", "ie", endpoint.name, "--namespace", namespace)
        return False

    wait_for(is_refused, "the webhook responds after its pods were killed", 120)

    deleted_namespace = f"{namespace}-gone"
    cluster.kubectl("create", "namespace", deleted_namespace)
    cluster.apply(deleted_namespace, demo(template=nowhere))
    wait_for(lambda: cluster.find("deployment", "demo", "--namespace", deleted_namespace), "a Deployment", 60)

    scale_operator(cluster, 0)
    try:
        endpoint.apply(document)
        cluster.kubectl("delete", "namespace", deleted_namespace, "--timeout=90s")
        assert not endpoint.condition()
    finally:
        scale_operator(cluster, 2)
    assert "nvidia-a1000" in endpoint.wait_reason("UnknownAccelerator", kind="Accepted", timeout=60)["message"]


@pytest.mark.further
@pytest.mark.timeout(900)
def test_uninstall_with_live_endpoints_costs_no_request(
    cluster: Cluster, images: Images, chart: None, namespace: str, results: Results
) -> None:
    endpoint = Endpoint(cluster, namespace)
    endpoint.apply(demo())
    url = endpoint.wait_ready()["url"]
    lives = endpoint.lives()
    with traffic(cluster, namespace, images.client, url) as flow:
        began = time.monotonic()
        release.uninstall(cluster)
        assert cluster.find("crd", "inferenceendpoints.stoker.dev")
        assert not cluster.find("validatingwebhookconfiguration", "stoker")
        endpoint.patch(replicas=1, engine={"maxNumSeqs": 16})  # stored without an operator
        flow.wait_for(10)
        assert endpoint.lives() == lives
        endpoint.patch(engine={"maxNumSeqs": None})
        release.install(cluster, images)
        endpoint.wait_ready()
        recovery = time.monotonic() - began
        flow.wait_for(10)
    results.add("chart uninstalled and installed", flow.result, recovery)
    flow.result.unbroken()
    assert endpoint.lives() == lives
