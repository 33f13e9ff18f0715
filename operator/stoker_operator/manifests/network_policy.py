"""The NetworkPolicy of an endpoint's pods: allows requests to the API's port from permitted peers.

NetworkPolicies are additive. Any further port that this one allowed, such as a sidecar's, would also be open in a
namespace whose own policies deny everything. Egress is not restricted, because models may come from anywhere.
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
    """Return the endpoint's NetworkPolicy, or None if the spec disables it. `gateway` serves the endpoint, if given."""
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
    """Return the gateway's pods as a peer.

    Labels are sufficient: a user who can create pods in that namespace can also read the gateway's keys.
    """
    labels = {"app.kubernetes.io/name": "stoker-gateway", "app.kubernetes.io/component": "gateway"}
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": gateway.namespace}},
        "podSelector": {"matchLabels": labels},
    }


def _peer(peer: NetworkPolicyPeer) -> Manifest:
    """Return a peer as the API server stores it: empty selectors are kept, empty fields in them are omitted."""
    manifest: Manifest = peer.model_dump(by_alias=True, exclude_none=True)
    return {kind: {name: value for name, value in part.items() if value} for kind, part in manifest.items()}
