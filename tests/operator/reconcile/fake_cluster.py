"""A minimal fake cluster that records requests, and an operator that works on it."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster.informer import Informer
from stoker_operator.cluster.kube import KubeError, Listing
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import EngineStates, Key, Reported
from stoker_operator.objects.owner import INSTANCE
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile.apply import MANAGER, Writer
from stoker_operator.reconcile.cluster import Cluster
from stoker_operator.reconcile.evaluate import PlanningContext
from stoker_operator.reconcile.reconcile import Outcome, reconcile
from stoker_operator.workloads.composition import ONE_DEPLOYMENT, Composition

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = Key("default", "demo")


class FakeKube:
    """Objects by kind and name, and the recorded requests."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.requests: list[str] = []
        self.version = 100
        self.refuse: dict[str, str] = {}

    def seen(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        live: dict[str, Any] = copy.deepcopy(body)
        live["metadata"] |= {"resourceVersion": str(self.version), "uid": f"uid-{body['kind']}"}
        live["metadata"].setdefault("generation", 1)
        live["metadata"].setdefault("creationTimestamp", f"{NOON:%Y-%m-%dT%H:%M:%SZ}")
        self.objects[live["kind"], live["metadata"]["name"]] = live
        return copy.deepcopy(live)

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.requests.append(f"get {kind}")
        return copy.deepcopy(self.objects.get((kind, name)))

    def list(self, kind: str, namespace: str = "", labels: Any = None, fields: str = "") -> Listing:
        self.requests.append(f"list {kind}")
        name = fields.removeprefix("metadata.name=")
        found = [copy.deepcopy(live) for id, live in self.objects.items() if id[0] == kind and name in ("", id[1])]
        return Listing(found, str(self.version))

    def serves(self, kind: str) -> bool:
        return False

    def apply(self, body: Any, manager: str, subresource: str = "", *, dry_run: bool = False) -> dict[str, Any]:
        kind = body["kind"]
        self.requests.append(f"{'check' if dry_run else 'apply'} {kind}{f'/{subresource}' if subresource else ''}")
        if kind in self.refuse and not subresource:
            raise KubeError(422, self.refuse[kind])
        before = self.objects.get((kind, body["metadata"]["name"]), {})
        version = body["metadata"].get("resourceVersion")
        if before and version not in (None, before["metadata"]["resourceVersion"]):
            raise KubeError(409, "the object has been modified")
        if dry_run:
            return dict(body)
        if subresource:
            return self.seen({**before, "status": body["status"]})
        fields = {f"f:{name}": _fields(body[name]) for name in body.keys() & {"spec"}}
        entry = {"manager": manager, "operation": "Apply", "fieldsV1": fields}
        metadata = {**body["metadata"], "managedFields": [entry]}
        if before:
            metadata["generation"] = before["metadata"]["generation"] + (before.get("spec") != body.get("spec"))
        return self.seen({**body, "metadata": metadata, "status": before.get("status", {})})

    def create(self, body: Any) -> dict[str, Any]:
        self.requests.append(f"create {body['kind']} {body.get('reason', '')}".rstrip())
        return dict(body)

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self.requests.append(f"delete {kind}")
        del self.objects[kind, name]


def _fields(value: Any) -> Any:
    return {f"f:{name}": _fields(inner) for name, inner in value.items()} if isinstance(value, dict) else {}


class World:
    """The fake cluster with an operator."""

    def __init__(self, document: dict[str, Any], composition: Composition = ONE_DEPLOYMENT) -> None:
        self.kube: Any = FakeKube()
        self.document = document
        self.leading = True
        self.reported: Reported | None = None
        self.engines: dict[str, EngineStates] = {}
        self.asked_for_engines: list[Any] = []
        self.now = NOON
        self.context = PlanningContext(Catalogue.load(), composition=composition)
        self.kube.seen({**document, "metadata": {**document["metadata"], "uid": "u"}})
        self.restart()

    def restart(self) -> None:
        self.store = Store(MANAGER, INSTANCE)
        Informer(self.kube, self.store, kinds=self.context.composition.kinds).relist()
        writer = Writer(self.kube, self.store, lambda: self.leading)

        def engines(*pod_key: Any) -> dict[str, EngineStates]:
            self.asked_for_engines.append(pod_key)
            return self.engines

        self.cluster = Cluster(self.kube, self.store, writer, reported=lambda *_: self.reported, engines=engines)
        self.kube.requests.clear()

    def reconcile(self) -> tuple[Outcome, list[str]]:
        self.kube.requests.clear()
        return reconcile(self.cluster, self.context, KEY, self.now), list(self.kube.requests)

    def change(self, kind: str, name: str = "demo", **parts: Any) -> None:
        live = self.kube.objects[kind, name]
        self.store.put(self.kube.seen({**live, **parts}))

    def pod(self, **status: Any) -> None:
        """Set the status of the endpoint's pod."""
        template = self.kube.objects["Deployment", "demo"]["spec"]["template"]
        labels = {**template["metadata"]["labels"], "pod-template-hash": "1"}
        metadata = {
            "name": "demo-1",
            "namespace": "default",
            "labels": labels,
            "creationTimestamp": "2026-01-01T12:00:00Z",
        }
        self.store.put(
            self.kube.seen({"kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": status})
        )

    def spec(self, **spec: Any) -> None:
        live = self.kube.objects[KIND, "demo"]
        live["metadata"]["generation"] += 1
        self.change(KIND, spec={**live["spec"], **spec})

    def ready(self) -> Any:
        return self.kube.objects[KIND, "demo"]["status"]["conditions"][-1]

    def serve(self) -> None:
        replicas = self.kube.objects["Deployment", "demo"]["spec"]["replicas"]
        names = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas", "observedGeneration")
        self.change("Deployment", status={**dict.fromkeys(names, replicas), "observedGeneration": 99})
