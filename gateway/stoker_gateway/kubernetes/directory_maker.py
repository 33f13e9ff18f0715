"""Endpoints, their pods and their credentials → the directory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from stoker_gateway.directory import Directory, Endpoint, cluster_name
from stoker_gateway.kubernetes.facts import EndpointFacts, SliceFacts
from stoker_gateway.kubernetes.watch import Name

#: Why an endpoint's requests are refused, in words for clients: they say nothing of whose it is.
NO_CREDENTIAL: Final = "the gateway cannot read the key that its servers want; who runs it can see why in the log"
TLS: Final = "its servers speak TLS, and the gateway does not to servers"


def make(
    endpoints: Iterable[EndpointFacts], slices: Iterable[SliceFacts], credentials: Mapping[Name, tuple[str, ...]]
) -> Directory:
    """The directory. A served name that several endpoints have belongs to the oldest.

    Args:
        credentials: the key that servers want, and then earlier ones, by the Secret that has them; without those that
            cannot be read.
    """
    servers = _servers(slices)
    made: dict[str, Endpoint] = {}
    for facts in sorted(endpoints, key=lambda each: (each.created, each.namespace, each.name)):
        at = (facts.namespace, facts.name)
        authorizations, refusal = list[str](), None
        if facts.secret is not None:
            authorizations = [f"Bearer {key}" for key in credentials.get((facts.namespace, facts.secret), ())]
            refusal = None if authorizations else NO_CREDENTIAL
        if facts.speaks_tls:
            refusal = TLS
        for served in facts.served_names:
            if served not in made:
                made[served] = Endpoint(
                    served,
                    cluster_name(served),
                    () if facts.speaks_tls else servers.get(at, ()),
                    facts.session_header,
                    authorizations[0] if authorizations else None,
                    int(facts.created) if math.isfinite(facts.created) else 0,
                    refusal,
                    tuple(authorizations[1:]),
                )
    return Directory(made)


def _servers(slices: Iterable[SliceFacts]) -> dict[Name, tuple[str, ...]]:
    """Each pod once, though it may have an address of each kind, or be in two slices while it moves between them."""
    found: dict[Name, dict[str, str]] = {}
    for each in slices:
        pods = found.setdefault((each.namespace, each.service), {})
        for pod, server in each.servers:
            if pod not in pods or (server.startswith("["), server) < (pods[pod].startswith("["), pods[pod]):
                pods[pod] = server
    return {service: tuple(sorted(set(pods.values()))) for service, pods in found.items()}
