"""How many pods of an endpoint may be evicted at a time, by a drained node for example: one."""

from __future__ import annotations

from collections.abc import Mapping

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.objects.owner import Manifest, Owner


def disruption_budget(owner: Owner, spec: Spec, pods: Mapping[str, str]) -> Manifest | None:
    """The endpoint's PodDisruptionBudget for the pods with these labels; None for a single replica, which could never
    be evicted then.

    A pod that is not ready serves nobody, so it may always be evicted: by the default policy (IfHealthyBudget) an
    endpoint that does not start would hold up the drain of its nodes.
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
