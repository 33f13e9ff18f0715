"""The PodDisruptionBudget of an endpoint: one ready pod may be evicted at a time, for example by draining its node."""

from __future__ import annotations

from collections.abc import Mapping

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.objects.owner import Manifest, Owner


def disruption_budget(owner: Owner, spec: Spec, pods: Mapping[str, str]) -> Manifest | None:
    """Return the PodDisruptionBudget for the pods with these labels; None unless several replicas can be desired.

    With maxUnavailable 1, a budget would not restrict the eviction of a single replica. A pod that is not ready serves
    no requests, so it may always be evicted; with the default policy (IfHealthyBudget) an endpoint that does not start
    would block the drain of its nodes.
    """
    if spec.most_replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": dict(pods)},
        },
    }
