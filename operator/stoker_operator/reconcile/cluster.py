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
        reported: returns the facts that an engine has reported, or None without a report. The arguments are
            the endpoint, the workload, the pod and the URL of its metrics.
        engines: returns the states of the engines of each pod. The arguments are the endpoint, the workload, and the
            URLs of the metrics of pods in which several processes compute.
        operators: chooses between this operator and others that watch the same namespace; None to ignore others.
        version: returns when a Secret or ConfigMap was created and its data changed, or None if unknown. The arguments
            are its namespace and reference.
    """

    kube: Kube
    store: Store
    writer: Writer
    holders: Callable[[], Sequence[Holder]] = tuple
    reported: Callable[[Key, str, str, str], Reported | None] = lambda _key, _workload, _pod, _url: None
    engines: Callable[[Key, str, Mapping[str, str]], Mapping[str, EngineStates]] = lambda _key, _workload, _urls: {}
    operators: OtherOperators | None = None
    version: Callable[[str, Reference], Version | None] = lambda _namespace, _reference: None
