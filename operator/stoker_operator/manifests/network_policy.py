"""Which traffic reaches an endpoint's pods: requests to the port that serves the API, from whom they may come.

A NetworkPolicy only ever adds to what others let in. So whatever this one opened beyond that, such as a sidecar's port,
would be open in a namespace whose own policies close everything. What pods may reach themselves is left alone: models
come from anywhere.
"""

from __future__ import annotations

from typing import Any

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.network_policy import NetworkPolicyPeer
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.policy.policy import Policy
from stoker_operator.runtimes.runtime import PORT
from stoker_operator.settings import GatewaySettings


def network_policy(owner: Owner, spec: Spec, policy: Policy, gateway: GatewaySettings | None = None) -> Manifest | None:
    """The endpoint's NetworkPolicy; None where there is to be none. `gateway` is the one that serves the endpoint."""
    mode = spec.network_policy.resolved
    if mode == "None":
        return None
    rule: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": PORT}]}
    if mode == "Namespace":
        peers = [*(policy.network_policy_from or ()), *(spec.network_policy.from_ or ())]
        gateways = [gateway_pods(gateway)] if gateway else []
        rule["from"] = [{"podSelector": {}}, *map(_peer, peers), *gateways]
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


def gateway_pods(gateway: GatewaySettings) -> Manifest:
    """The gateway's pods, as a peer. Whoever may make pods in its namespace may read its keys as well."""
    labels = {"app.kubernetes.io/name": "stoker-gateway", "app.kubernetes.io/component": "gateway"}
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": gateway.namespace}},
        "podSelector": {"matchLabels": labels},
    }


def _peer(peer: NetworkPolicyPeer) -> Manifest:
    """As the API server stores it: an empty selector means all, and what is empty inside of one is left out."""
    manifest: Manifest = peer.model_dump(by_alias=True, exclude_none=True)
    return {kind: {name: value for name, value in part.items() if value} for kind, part in manifest.items()}
