"""Endpoints of two workloads, each with two StatefulSets, on a real API server.

Only one file of the operator depends on Deployments. The workload kind exists only in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from .cluster_client import Cluster
from .operator_process import Operator

SETS = ("demo-leader", "demo-prefill-leader", "demo-prefill-worker", "demo-worker")
SEQUENCES = "test/prefill-max-num-seqs"


@pytest.fixture(scope="module")
def composed(kube: Cluster, operators_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator with this workload kind, with the chart's rights and those that the kind needs."""
    rbac: Any = client.RbacAuthorizationV1Api(kube.api)
    verbs = ["get", "list", "watch", "create", "patch", "delete"]
    rule = {"apiGroups": ["apps"], "resources": ["statefulsets"], "verbs": verbs}
    role = {"metadata": {"name": "stoker-statefulsets"}, "rules": [rule]}
    rbac.create_cluster_role(role)
    group = "rbac.authorization.k8s.io"
    rbac.create_cluster_role_binding(
        {
            "metadata": {"name": "stoker-statefulsets"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "stoker-statefulsets"},
            "subjects": [{"kind": "ServiceAccount", "name": "stoker", "namespace": "stoker-system"}],
        }
    )
    log = tmp_path_factory.mktemp("composed") / "log"
    with Operator(
        operators_kubeconfig, log, program=(str(Path(__file__).with_name("composed_operator.py")),)
    ) as running:
        yield running
    rbac.delete_cluster_role_binding("stoker-statefulsets")
    rbac.delete_cluster_role("stoker-statefulsets")


@pytest.fixture(autouse=True)
def running(sleeping_operator: Operator, composed: Operator) -> Operator:
    """The one running operator."""
    sleeping_operator.stop()
    return composed


def stateful_set(kube: Any, ns: str, name: str) -> Any:
    return kube.get(f"/apis/apps/v1/namespaces/{ns}/statefulsets/{name}")


def revisions(kube: Any, ns: str) -> dict[str, str]:
    """Return the revision of each StatefulSet's pods, once its controller has seen the newest template."""
    found = {name: stateful_set(kube, ns, name) for name in SETS}
    seen = {
        name: each["status"]["updateRevision"]
        for name, each in found.items()
        if each.get("status", {}).get("observedGeneration") == each["metadata"]["generation"]
    }
    return seen if len(seen) == len(SETS) else {}


def serve(kube: Any, ns: str, but: str = "") -> Any:
    """Act as the kubelet: mark all pods as ready except those of `but`."""
    pods = kube.pods(ns, "demo")
    for pod in pods:
        if pod.status.phase == "Pending" and pod.metadata.name != but:
            kube.mark_ready(ns, pod.metadata.name)
    return len(pods)


def ready(kube: Any, ns: str, status: str = "True") -> Any:
    condition = kube.condition(ns, "demo")
    return condition if condition.get("status") == status else None


def until_ready(kube: Any, ns: str, eventually: Callable[..., Any]) -> None:
    eventually(lambda: serve(kube, ns) and ready(kube, ns), "Ready")


def test_endpoint_of_two_workloads_is_created_reported_and_deleted(
    kube: Any, ns: str, document: Any, eventually: Any, running: Any
) -> None:
    # Creation: objects, and status with replicas and pods.
    kube.create(ns, document(replicas=2))
    eventually(lambda: serve(kube, ns, "demo-prefill-worker-1") == 8, "every pod is made")

    def lacks_one() -> Any:
        serve(kube, ns, "demo-prefill-worker-1")
        message = kube.condition(ns, "demo").get("message", "")
        return "1 of 2 replicas are ready with the newest spec, 3 of 4 pods are ready" in message

    eventually(lacks_one, "the message counts replicas and pods")
    selector = kube.get(f"/api/v1/namespaces/{ns}/services/demo")["spec"]["selector"]
    assert (selector["stoker.dev/workload"], selector["app.kubernetes.io/component"]) == ("main", "leader")
    assert all(each["metadata"]["ownerReferences"] for each in (stateful_set(kube, ns, name) for name in SETS))

    # A failing pod of the workload that does not serve requests.
    lacking = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    kube.set_pod_status(ns, "demo-prefill-worker-1", conditions=[lacking])
    trouble = eventually(
        lambda: (found := ready(kube, ns, "False")) and found["reason"] == "Unschedulable" and found, "diagnosed"
    )
    assert "pod demo-prefill-worker-1" in trouble["message"]
    assert kube.condition(ns, "demo", "Available")["status"] == "True"
    until_ready(kube, ns, eventually)
    status = kube.endpoint(ns, "demo")["status"]
    assert (status["replicas"], status["readyReplicas"], status["availableReplicas"]) == (2, 2, 2)
    assert [each["name"] for each in status["workloads"]] == ["main", "prefill"]

    # The scale subresource applies to the serving workload, and restarts nothing.
    scale = kube.custom.get_namespaced_custom_object_scale("stoker.dev", "v1alpha1", ns, "inferenceendpoints", "demo")
    assert (scale["status"]["replicas"], "app.kubernetes.io/component=leader" in scale["status"]["selector"]) == (
        2,
        True,
    )
    before = revisions(kube, ns)
    writes = kube.writes(ns)["statefulsets"]

    # A change of one workload restarts only that one.
    kube.patch(ns, "demo", {"template": {"metadata": {"annotations": {SEQUENCES: "3"}}}})

    def changed() -> Any:
        now = revisions(kube, ns)
        return now and all(now[name] != before[name] for name in SETS if "prefill" in name) and now

    after = eventually(changed, "prefill takes up its change")
    assert {name for name in SETS if before[name] != after[name]} == {"demo-prefill-leader", "demo-prefill-worker"}
    until_ready(kube, ns, eventually)
    assert {name: each for name, each in revisions(kube, ns).items() if "prefill" not in name} == {
        name: each for name, each in before.items() if "prefill" not in name
    }

    # Deleted objects are recreated and pinned as before.
    uid = stateful_set(kube, ns, "demo-worker")["metadata"]["uid"]
    kube.apps.delete_namespaced_stateful_set("demo-worker", ns)
    eventually(lambda: stateful_set(kube, ns, "demo-worker")["metadata"]["uid"] != uid, "it is back")
    assert eventually(lambda: revisions(kube, ns), "and seen")["demo-worker"] == before["demo-worker"]

    def has_pods() -> bool:
        return serve(kube, ns) == 8 and stateful_set(kube, ns, "demo-worker")["status"].get("readyReplicas") == 2

    eventually(has_pods, "its pods serve")
    until_ready(kube, ns, eventually)

    # A restarted operator finds its objects, and writes nothing.
    written = kube.writes(ns)["statefulsets"]
    assert written > writes
    running.stop()
    running.start()
    eventually(lambda: running.reconciles() > 0, "it has looked")
    assert kube.writes(ns)["statefulsets"] - written == 0 and ready(kube, ns)

    # Deletion: its objects are deleted with it.
    kube.delete(ns, "demo")
    eventually(
        lambda: not kube.apps.list_namespaced_stateful_set(ns).items and not kube.pods(ns, "demo"), "all are gone"
    )


def test_templates_refused_by_the_api_server_are_reported(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document(template={"spec": {"containers": [{"name": "engine", "nothing": 1}]}}))
    condition = eventually(lambda: ready(kube, ns, "False"), "it is reported")
    assert condition["reason"] == "InvalidTemplate"
    assert not kube.apps.list_namespaced_stateful_set(ns).items
