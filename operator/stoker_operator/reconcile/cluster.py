"""The cluster as a reconcile sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import EngineStates, Key, Reported
from stoker_operator.plan.capacity import Holder
from stoker_operator.reconcile.apply import Writer
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.referenced_objects import Reference, Version


@dataclass(frozen=True)
class Cluster:
    """Access to the cluster for a reconcile.

    Attributes:
        kube: the API server's client.
        store: the watched objects.
        writer: writes objects and status.
        holders: lists the pods that occupy accelerators.
        reported: returns what an engine reports, by endpoint, workload, pod and the URL of its metrics; None: nothing
            yet.
        engines: returns the engines' states by pod, if several processes compute, by endpoint, workload and the URLs
            of the pods' metrics.
        operators: this operator's name, and the other operators that serve endpoints; None: operators have no names.
        version: returns when a Secret's or ConfigMap's data changed, by namespace and reference; None: unknown.
    """

    kube: Kube
    store: Store
    writer: Writer
    holders: Callable[[], Sequence[Holder]] = tuple
    reported: Callable[[Key, str, str, str], Reported | None] = lambda _key, _workload, _pod, _url: None
    engines: Callable[[Key, str, Mapping[str, str]], Mapping[str, EngineStates]] = lambda _key, _workload, _urls: {}
    operators: OtherOperators | None = None
    version: Callable[[str, Reference], Version | None] = lambda _namespace, _reference: None
