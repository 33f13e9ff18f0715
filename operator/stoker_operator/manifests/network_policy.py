"""Which traffic reaches an endpoint's pods: requests to the ports they declare, and nothing else.

What pods may reach themselves is left alone: models come from anywhere.
"""

from __future__ import annotations

from stoker_operator.manifests.owner import Manifest, Owner


def network_policy(owner: Owner, pod: Manifest) -> Manifest:
    """The endpoint's NetworkPolicy, for pods of the spec `pod`."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owner.metadata(),
        "spec": {
            "podSelector": {"matchLabels": owner.selector()},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": _ports(pod)}],
        },
    }


def _ports(pod: Manifest) -> list[Manifest]:
    ports: list[Manifest] = []
    # An init container that restarts always is a sidecar.
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        for port in container.get("ports", ()):
            allowed = {"protocol": port["protocol"], "port": port.get("containerPort")}
            if allowed not in ports:
                ports.append(allowed)
    return ports
