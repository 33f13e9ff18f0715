"""Which traffic reaches an endpoint's pods: requests to the port that serves the API, from whom they may come.

A NetworkPolicy only ever adds to what others let in. So whatever this one opened beyond that, such as a sidecar's port,
would be open in a namespace whose own policies close everything. What pods may reach themselves is left alone: models
come from anywhere.
"""

from __future__ import annotations

from typing import Any

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.owner import Manifest, Owner
from stoker_operator.policy import Policy
from stoker_operator.runtimes.runtime import PORT


def network_policy(owner: Owner, spec: Spec, policy: Policy) -> Manifest | None:
    """The endpoint's NetworkPolicy; None where there is to be none."""
    mode = spec.network_policy.resolved
    if mode == "None":
        return None
    rule: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": PORT}]}
    if mode == "Namespace":
        peers = [*(policy.network_policy_from or ()), *(spec.network_policy.from_ or ())]
        rule["from"] = [{"podSelector": {}}, *(each.model_dump(by_alias=True, exclude_none=True) for each in peers)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owner.metadata(),
        "spec": {
            "podSelector": {"matchLabels": owner.selector()},
            "policyTypes": ["Ingress"],
            "ingress": [rule],
        },
    }
