"""The URLs of an endpoint, as its status reports them. Pure."""

from __future__ import annotations

from typing import Any, Final

from stoker_operator.manifests.service import url
from stoker_operator.objects.facts import Child, Object
from stoker_operator.reconcile.decide import Decision, is_ours
from stoker_operator.reconcile.observed import Observed
from stoker_operator.settings import GatewaySettings

#: Maximum number of listed addresses.
_ADDRESSES: Final = 16


def addresses(decision: Decision, seen: Observed) -> dict[str, Any]:
    """Return `status.url` and `status.addresses`, as far as they exist."""
    serving, service = decision.evaluation.serving, _service(decision, seen)
    gateway = serving_gateway(decision, seen)
    routed = [{"name": "gateway", "url": f"{gateway.url}/v1"}] if gateway else []
    if service is None:
        return {}
    if serving is None:
        return {"addresses": routed} if routed else {}
    internal = url(decision.owner, serving.spec)
    listed = [{"name": "cluster", "url": internal}]
    scheme, _, after_scheme = internal.partition("://")
    port = after_scheme.partition("/")[0].rpartition(":")[2]
    balancer: Any = (service.get("status") or {}).get("loadBalancer") or {}
    for ingress in balancer.get("ingress") or ():
        host = ingress.get("hostname") or ingress.get("ip")
        if host:
            host = f"[{host}]" if ":" in host else host
            name = "loadBalancer" if len(listed) == 1 else f"loadBalancer-{len(listed)}"
            listed.append({"name": name, "url": f"{scheme}://{host}:{port}/v1"})
    return {"url": internal, "addresses": listed[: _ADDRESSES - len(routed)] + routed}


def _service(decision: Decision, seen: Observed) -> Object | None:
    """Return the endpoint's own Service; None if there is none."""
    service = seen.live.get(Child("Service"))
    return service if service is not None and is_ours(decision.owner, service) else None


def serving_gateway(decision: Decision, seen: Observed) -> GatewaySettings | None:
    """Return the gateway that serves the endpoint; None if there is none, or no Service by which it finds the pods."""
    return seen.route.gateway if seen.route and _service(decision, seen) is not None else None
