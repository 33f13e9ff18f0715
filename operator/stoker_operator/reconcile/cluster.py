"""What a reconcile reads from and writes to."""

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
    """What a reconcile works with.

    Attributes:
        kube: the cluster.
        store: what has been seen.
        writer: who writes.
        holders: who holds accelerators; listed on call.
        reported: what an engine reports, where it did; by endpoint, workload, pod and the URL of its metrics.
        engines: which engines serve, by pod, where several processes compute; by endpoint, workload, and the URLs of
            the pods' metrics.
        operators: this operator's name, and which others serve endpoints; None: no operator has a name.
        version: when a Secret or ConfigMap got its data, by its namespace; None where nothing is known of it.
    """

    kube: Kube
    store: Store
    writer: Writer
    holders: Callable[[], Sequence[Holder]] = tuple
    reported: Callable[[Key, str, str, str], Reported | None] = lambda _key, _workload, _pod, _url: None
    engines: Callable[[Key, str, Mapping[str, str]], Mapping[str, EngineStates]] = lambda _key, _workload, _urls: {}
    operators: OtherOperators | None = None
    version: Callable[[str, Reference], Version | None] = lambda _namespace, _reference: None
