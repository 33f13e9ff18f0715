"""Keeps the store up to date: lists everything at the start and now and then, and takes in the events of watches.

Watches alone do not suffice. A watch begins with what there is, without a sign of when that is complete, and acting on
half of it would create what exists. And one that was interrupted for long starts again, and never reports what was
deleted in between. A list settles both, at one request a kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from stoker_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import Key, Object
from stoker_operator.objects.owner import INSTANCE, MANAGED_BY
from stoker_operator.workloads.composition import ONE_DEPLOYMENT
from stoker_operator.workloads.kind import WorkloadKind


class Watched(NamedTuple):
    """A kind of object that is watched.

    Attributes:
        managed_only: only those that carry the label of our objects.
        optional: it comes with something else that a cluster may not have.
        clusterwide: it has no namespace, so that an operator confined to some may not see it.
        gateway: it matters only where there is a gateway.
    """

    kind: str
    group: str
    version: str
    plural: str
    managed_only: bool = True
    optional: bool = False
    clusterwide: bool = False
    gateway: bool = False


_ENDPOINTS: Final = Watched(KIND, GROUP, VERSION, PLURAL, managed_only=False)
#: Beside endpoints and the kinds of their workloads.
_OTHERS: Final = (
    Watched("Service", "", "v1", "services"),
    Watched("ServiceAccount", "", "v1", "serviceaccounts"),
    Watched("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims"),
    Watched("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
    Watched("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    Watched("PodMonitor", "monitoring.coreos.com", "v1", "podmonitors", optional=True),
    Watched("Pod", "", "v1", "pods"),
    Watched("Node", "", "v1", "nodes", managed_only=False, clusterwide=True),
    Watched("Namespace", "", "v1", "namespaces", managed_only=False, clusterwide=True, gateway=True),
    Watched("Role", "rbac.authorization.k8s.io", "v1", "roles", gateway=True),
    Watched("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings", gateway=True),
)


class Informer:
    """What keeps the store.

    Args:
        kube: the cluster.
        store: what is kept.
        namespaces: those to look into; none means all.
        gateway: whether there is a gateway, for which more is looked at.
        kinds: the kinds of object that run endpoints' pods.

    Attributes:
        filled: everything has been listed once.
        pod_monitors: the cluster has PodMonitors.
        needs_relist: an event is impossible unless versions went back, as by a backup of etcd; a list will settle it.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        namespaces: tuple[str, ...] = (),
        *,
        gateway: bool = False,
        kinds: Sequence[WorkloadKind] = ONE_DEPLOYMENT.kinds,
    ) -> None:
        self._gateway = gateway
        self._all = (_ENDPOINTS, *(Watched(*each.resource) for each in kinds), *_OTHERS)
        self._kube = kube
        self._store = store
        self._namespaces = namespaces
        self._news: set[Key] = set()
        self.filled = False
        self.needs_relist = False
        self.pod_monitors = False

    def discover(self) -> None:
        """Looks which optional kinds the cluster has. Blocks.

        Raises:
            KubeError: the API server could not be reached, or could not answer.
        """
        self.pod_monitors = self._kube.serves("PodMonitor")

    def relist(self) -> None:
        """Lists everything; `news` returns what changed. Blocks.

        Raises:
            KubeError: as `discover`.
        """
        self.discover()
        self.needs_relist = False
        for watched in self.watched():
            for namespace in self._namespaces or ("",):
                labels = MANAGED_BY if watched.managed_only else None
                since = self._store.newest(watched.kind, namespace)
                items, version = self._kube.list(watched.kind, namespace, labels)
                news = self._store.replace(watched.kind, namespace, items, version, since)
                self._news |= {key for each in news for key in self._concerned(each)}
        self.filled = True

    def news(self) -> set[Key]:
        """The endpoints for which lists found a change since the last call, also lists before one that failed."""
        news, self._news = self._news, set()
        return news

    def watched(self) -> Iterator[Watched]:
        """The kinds there are to watch."""
        for watched in self._all:
            if watched.gateway and not self._gateway:
                continue
            if not (watched.optional and not self.pod_monitors) and not (watched.clusterwide and self._namespaces):
                yield watched

    def on_event(self, kind: str, change: str | None, seen: Object) -> set[Key]:
        """Takes in an event of a watch; returns the endpoints that it may change something for.

        Args:
            kind: the kind of object.
            change: ``DELETED``, or anything else; None where the watch begins with a list.
            seen: the object.
        """
        live: dict[str, Any] = {**seen, "kind": kind}
        if change is None and self._store.contradicts(live):
            self.needs_relist = True
        if change == "DELETED":
            self._store.remove(live)
        elif not self._store.put(live):
            return set()
        return self._concerned(live)

    def endpoints(self) -> list[Key]:
        """All endpoints there are."""
        return [Key(each["metadata"]["namespace"], each["metadata"]["name"]) for each in self._store.all(KIND)]

    def _concerned(self, seen: Object) -> set[Key]:
        """The endpoint that an object is, or belongs to, or those of a namespace."""
        metadata = seen["metadata"]
        if seen["kind"] == KIND:
            return {Key(metadata["namespace"], metadata["name"])}
        if seen["kind"] == "Namespace":
            return {key for key in self.endpoints() if key.namespace == metadata["name"]}
        instance = (metadata.get("labels") or {}).get(INSTANCE)
        return {Key(metadata["namespace"], instance)} if instance and "namespace" in metadata else set()
