"""The informer fills the store from lists and watches, and returns the endpoints that an event concerns."""

from __future__ import annotations

from typing import Any

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster.informer import Informer
from stoker_operator.cluster.kube import Listing
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import Key
from stoker_operator.objects.owner import INSTANCE


class FakeKube:
    """Returns given lists."""

    def __init__(self, *objects: Any, kinds: tuple[str, ...] = ()) -> None:
        self.objects, self.kinds = objects, kinds
        self.requests: list[tuple[str, str]] = []

    def serves(self, kind: str) -> bool:
        return kind in self.kinds

    def list(self, kind: str, namespace: str, labels: Any) -> Listing:
        self.requests.append((kind, namespace))
        return Listing([each for each in self.objects if each["kind"] == kind], "50")


def seen(kind: str, version: int, name: str = "demo", **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "resourceVersion": str(version), "labels": labels}
    return {"kind": kind, "metadata": metadata, "spec": {"containers": []}}


def informer(*objects: Any, **options: Any) -> tuple[Informer, Store, FakeKube]:
    kinds = options.pop("kinds", ())
    kube: Any = FakeKube(*objects, kinds=kinds)
    store = Store("stoker", INSTANCE)
    return Informer(kube, store, **options), store, kube


def test_endpoint_is_reported_once_per_change() -> None:
    watching, _, _ = informer()
    label = {INSTANCE: "demo"}
    assert watching.on_event(KIND, None, seen(KIND, 1)) == {Key("ns", "demo")}
    assert watching.on_event(KIND, "MODIFIED", seen(KIND, 1)) == set()  # the watch event of the operator's own write
    assert watching.on_event("Pod", "ADDED", seen("Pod", 2, "demo-abc", **label)) == {Key("ns", "demo")}
    assert watching.on_event("Pod", "DELETED", seen("Pod", 3, "demo-abc", **label)) == {Key("ns", "demo")}
    assert watching.on_event("Service", "ADDED", seen("Service", 4, "other")) == set()  # no endpoint's


def test_list_finds_changes_that_a_watch_missed() -> None:
    watching, store, _ = informer(seen(KIND, 9, "listed"))
    store.put(seen(KIND, 3, "deleted-meanwhile"))
    watching.relist()
    assert watching.filled
    assert watching.endpoints() == [Key("ns", "listed")]


def test_kinds_unknown_to_the_cluster_are_not_listed() -> None:
    watching, _, kube = informer()
    watching.relist()
    assert "PodMonitor" not in {kind for kind, _ in kube.requests}
    watching, _, kube = informer(kinds=("PodMonitor",))
    watching.relist()
    assert ("PodMonitor", "") in kube.requests and watching.pod_monitors


def test_only_the_operators_namespaces_are_listed() -> None:
    watching, _, kube = informer(namespaces=("one", "two"))
    watching.relist()
    assert {namespace for _, namespace in kube.requests} == {"one", "two"}
    assert "Node" not in {kind for kind, _ in kube.requests}


def test_objects_for_the_gateway_are_listed_only_with_a_gateway() -> None:
    namespace = {"kind": "Namespace", "metadata": {"name": "ns", "resourceVersion": "1", "labels": {}}}
    needed = {"Namespace", "Role", "RoleBinding"}
    watching, _, kube = informer(namespace)
    watching.relist()
    assert not needed & {kind for kind, _ in kube.requests}
    watching, store, kube = informer(namespace, seen(KIND, 1), seen(KIND, 1, "other"), gateway=True)
    watching.relist()
    assert needed <= {kind for kind, _ in kube.requests}
    watched = {Key("ns", "demo"), Key("ns", "other")}
    assert watching.news() == watched
    labelled = {**namespace, "metadata": {**namespace["metadata"], "resourceVersion": "60", "annotations": {"a": "b"}}}
    assert watching.on_event("Namespace", "MODIFIED", {**labelled, "spec": {"finalizers": ["kubernetes"]}}) == watched
    assert "spec" not in (store.get("Namespace", "", "ns") or {})
