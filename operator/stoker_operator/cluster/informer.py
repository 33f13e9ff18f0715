"""Keeps the store up to date: with lists of all watched objects, at the start and periodically, and with watch events.

kopf's watches alone are not enough. They start with the existing objects and do not report when these are complete; a
reconcile based on half of them would create objects that already exist. After a long interruption a watch restarts, and
never reports what was deleted meanwhile. Lists solve both problems.
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
        managed_only: whether only objects with the operator's label are watched.
        optional: whether a cluster may lack the kind.
        clusterwide: whether the kind is cluster-scoped, so an operator confined to namespaces may not read it.
        gateway: whether the kind is needed only with a gateway.
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
#: Watched kinds besides endpoints and the kinds of their workloads.
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
    """Updates the store from the API server's lists and watches.

    Args:
        kube: the API server's client.
        store: holds the watched objects.
        namespaces: the namespaces to watch; all if empty.
        gateway: whether there is a gateway, which needs further kinds.
        kinds: the kinds of object that run endpoints' pods.

    Attributes:
        filled: whether all watched kinds have been listed.
        pod_monitors: whether the cluster had the kind PodMonitor at the last `discover`.
        needs_relist: whether an event since the last list has shown that resource versions went back, as after etcd is
            restored from a backup. The next list corrects the store.
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
        """Find out which optional kinds the cluster has. Blocks.

        Raises:
            KubeError: a request to the API server failed.
        """
        self.pod_monitors = self._kube.serves("PodMonitor")

    def relist(self) -> None:
        """List all watched objects; `news` then returns the endpoints to reconcile. Blocks.

        Raises:
            KubeError: a request to the API server failed.
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
        """Return the endpoints to reconcile after lists since the last call, including lists of a failed `relist`."""
        news, self._news = self._news, set()
        return news

    def watched(self) -> Iterator[Watched]:
        """Yield the kinds to watch."""
        for watched in self._all:
            if watched.gateway and not self._gateway:
                continue
            if not (watched.optional and not self.pod_monitors) and not (watched.clusterwide and self._namespaces):
                yield watched

    def on_event(self, kind: str, change: str | None, seen: Object) -> set[Key]:
        """Process an event of a watch, and return the endpoints to reconcile.

        Args:
            kind: the kind of object.
            change: type of the event, such as ``DELETED``; None for an object of the watch's initial list.
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
        """Return the keys of all endpoints."""
        return [Key(each["metadata"]["namespace"], each["metadata"]["name"]) for each in self._store.all(KIND)]

    def _concerned(self, seen: Object) -> set[Key]:
        """Return the endpoints to reconcile: the object itself, the one in its label, or all of the namespace."""
        metadata = seen["metadata"]
        if seen["kind"] == KIND:
            return {Key(metadata["namespace"], metadata["name"])}
        if seen["kind"] == "Namespace":
            return {key for key in self.endpoints() if key.namespace == metadata["name"]}
        instance = (metadata.get("labels") or {}).get(INSTANCE)
        return {Key(metadata["namespace"], instance)} if instance and "namespace" in metadata else set()
