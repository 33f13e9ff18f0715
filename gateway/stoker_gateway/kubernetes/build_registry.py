"""Builds the model registry from endpoints, their pods and their credentials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from stoker_gateway.kubernetes.facts import DEFAULT_HOLD_S, EndpointFacts, SliceFacts
from stoker_gateway.kubernetes.key_history import KeyHistory
from stoker_gateway.kubernetes.watch import Name
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry, Scaling, cluster_name

#: Reasons, shown to clients, why an endpoint's requests are rejected. They name neither its namespace nor its Secret.
NO_CREDENTIAL: Final = "the gateway cannot read the API key of the model's servers; the gateway's log states the reason"
TLS: Final = "its servers use TLS, which the gateway does not support"


def make(
    endpoints: Iterable[EndpointFacts],
    slices: Iterable[SliceFacts],
    credentials: Mapping[Name, str],
    history: KeyHistory,
    *,
    holds_external: bool = False,
) -> ModelRegistry:
    """Return the model registry. If several endpoints have the same served name, the oldest one serves it.

    Args:
        credentials: the servers' API keys by Secret; Secrets without a known key are absent.
        history: keys of earlier registries; updated by this call.
        holds_external: whether requests are also held for endpoints with `EndpointFacts.is_scaled_externally`.
    """
    slices = list(slices)
    servers, with_starting = _servers(slices), _servers(slices, with_starting=True)
    made: dict[str, Endpoint] = {}
    for facts in sorted(endpoints, key=lambda each: (each.created, each.namespace, each.name)):
        at = (facts.namespace, facts.name)
        key = None if facts.secret is None else credentials.get((facts.namespace, facts.secret))
        keys = history.update(at, facts.secret, key)
        authorizations = [None if each is None else f"Bearer {each}" for each in keys]
        refusal = None if authorizations else NO_CREDENTIAL
        if facts.speaks_tls:
            refusal = TLS
        scaling = facts.scaling
        if scaling is None and holds_external and facts.is_scaled_externally:
            scaling = Scaling(*at, DEFAULT_HOLD_S)
        for served in facts.served_names:
            if served not in made:
                made[served] = Endpoint(
                    served,
                    cluster_name(served),
                    # If requests may be held, starting pods are included, because the gateway's polls detect their
                    # readiness before EndpointSlices show it.
                    () if facts.speaks_tls else (with_starting if scaling else servers).get(at, ()),
                    facts.session_header,
                    authorizations[0] if authorizations else None,
                    int(facts.created) if math.isfinite(facts.created) else 0,
                    refusal,
                    tuple(each or "" for each in authorizations[1:]),
                    scaling,
                    at,
                )
    return ModelRegistry(made)


def _servers(slices: Iterable[SliceFacts], *, with_starting: bool = False) -> dict[Name, tuple[str, ...]]:
    """Return the servers of each Service, with each pod once: a pod may have an IPv4 and an IPv6 address, or be in two
    slices while it moves between them."""
    found: dict[Name, dict[str, str]] = {}
    for each in slices:
        pods = found.setdefault((each.namespace, each.service), {})
        for pod, server in (*each.servers, *(each.starting if with_starting else ())):
            if pod not in pods or (server.startswith("["), server) < (pods[pod].startswith("["), pods[pod]):
                pods[pod] = server
    return {service: tuple(sorted(set(pods.values()))) for service, pods in found.items()}
