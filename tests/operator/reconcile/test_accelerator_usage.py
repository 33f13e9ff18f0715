"""Pods that use accelerators, of all owners."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_operator.cluster.kube import Kube, KubeError, Listing
from stoker_operator.plan.capacity import Holder
from stoker_operator.reconcile import accelerator_usage
from stoker_operator.reconcile.accelerator_usage import AcceleratorUsage, holder

GPU = "nvidia.com/gpu"
OURS = {"app.kubernetes.io/managed-by": "stoker"}


def takes(gpus: int, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": {GPU: str(gpus), "cpu": "4"}}, **more}


def pod(*containers: Any, labels: Any = None, phase: str = "Running", node: str | None = "a", **spec: Any) -> Any:
    metadata = {"name": "pod", "namespace": "ns", "labels": labels}
    return {
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": containers, **spec},
        "status": {"phase": phase},
    }


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        (pod(takes(2)), Holder("ns/pod", "a", {GPU: 2})),
        (pod(takes(2), takes(1)), Holder("ns/pod", "a", {GPU: 3})),
        (pod(takes(2), labels={**OURS, "app.kubernetes.io/instance": "demo"}), Holder("ns/demo", "a", {GPU: 2})),
        (pod(takes(2), labels=OURS), Holder("ns/pod", "a", {GPU: 2})),
        (pod(takes(2), labels={"app.kubernetes.io/instance": "x"}), Holder("ns/pod", "a", {GPU: 2})),
        (pod(takes(2), phase="Failed"), None),
        (pod(takes(2), phase="Succeeded"), None),
        (pod(takes(2), phase="Pending"), Holder("ns/pod", "a", {GPU: 2})),
        (pod(takes(2), node=None), None),
        (pod(takes(0)), None),
        (pod({"name": "c"}), None),
        (pod({"name": "c", "resources": {"limits": None, "requests": {GPU: 1}}}), Holder("ns/pod", "a", {GPU: 1})),
        (pod(takes(1), initContainers=[takes(4), takes(3)]), Holder("ns/pod", "a", {GPU: 4})),
        (pod(takes(1), initContainers=[takes(1, restartPolicy="Always")]), Holder("ns/pod", "a", {GPU: 2})),
        (pod(takes(1), initContainers=[takes(1, restartPolicy="Always"), takes(2)]), Holder("ns/pod", "a", {GPU: 3})),
    ],
)
def test_accelerators_of_a_pod_are_counted(live: Any, expected: Holder | None) -> None:
    assert holder(live) == expected


class Cluster(Kube):
    """Pods in pages; counts the requests for them."""

    def __init__(self, *pages: Any) -> None:
        self.answers, self.rounds, self.broken = pages, 0, False

    def pages(self, kind: str, *_: Any, fields: str = "", **__: Any) -> Any:
        assert (kind, "spec.nodeName!=" in fields) == ("Pod", True)
        self.rounds += 1
        for page in self.answers:
            yield Listing(list(page), "1")
        if self.broken:
            raise KubeError(403, "no")


def test_usage_is_cached_for_some_seconds() -> None:
    cluster, clock = Cluster([pod(takes(1))], [pod(takes(2)), pod({"name": "c"})]), 100.0
    usage = AcceleratorUsage(cluster, lambda: clock)
    for _ in range(100):
        assert [each.requests[GPU] for each in usage.now()] == [1, 2]
    assert cluster.rounds == 1
    clock += 15
    usage.now()
    assert cluster.rounds == 2


def test_usage_is_empty_if_pods_cannot_be_listed(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster([pod(takes(1))])
    cluster.broken = True
    assert AcceleratorUsage(cluster).now() == ()
    assert caplog.records


def test_pods_are_listed_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def request(self: Any, method: str, path: str, *, query: Any) -> Any:
        requests.append(dict(query))
        more = {"continue": "next"} if len(requests) % 2 else {}
        return {"items": [pod(takes(len(requests)))], "metadata": {"resourceVersion": str(len(requests)), **more}}

    monkeypatch.setattr(Kube, "_request", request)
    kube = Kube(None)  # type: ignore[arg-type]
    assert [each.requests[GPU] for each in AcceleratorUsage(kube).now()] == [1, 2]
    assert "continue" not in requests[0] and requests[1]["continue"] == "next"
    assert requests[0]["fieldSelector"] == accelerator_usage._RUNNING
    items, version = kube.list("Pod")
    assert (len(items), items[0]["kind"], version) == (2, "Pod", "3")
