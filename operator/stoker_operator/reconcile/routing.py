"""Which endpoints the gateway serves: those that do not opt out, in namespaces that opted in.

An endpoint is served under all of its names or under none. A name belongs to the oldest endpoint that claims it, also
if that endpoint is not served because of another name. So a name's owner depends only on the endpoints that claim
the name.

Messages do not reveal the name or namespace of an endpoint in another namespace.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.errors import ArgumentError
from stoker_common.model_source import ModelSource
from stoker_operator.objects.facts import Key, Object
from stoker_operator.settings import GatewaySettings

#: The label by which a namespace opts in, and its value.
OPT_IN: Final = ("stoker.dev/gateway", "enabled")
_LABEL: Final = ": ".join(OPT_IN)


@dataclass(frozen=True)
class Route:
    """Whether the gateway serves an endpoint.

    Attributes:
        reason: the reason of the condition Routed.
        message: its message, with the remedy if there is one.
        gateway: the gateway that serves the endpoint, or None if it is not served.
    """

    reason: str
    message: str
    gateway: GatewaySettings | None = None


@dataclass(frozen=True)
class Claim:
    """The settings of an endpoint and its namespace that concern the gateway.

    Attributes:
        key: the endpoint.
        created: its creation timestamp, as the API server writes it.
        names: model names by which requests address it.
        wish: its ``routing.gateway``; empty if absent.
        opted_in: whether its namespace has opted in.
        secret: name of the Secret with its pods' API keys; empty without API keys.
        has_session: whether it sets ``routing.sessionHeader``.
    """

    key: Key
    created: str
    names: tuple[str, ...]
    wish: str
    opted_in: bool
    secret: str
    has_session: bool

    @property
    def holds(self) -> bool:
        """Whether the endpoint claims its names."""
        return self.opted_in and self.wish != "Disabled"


class Routes:
    """The routes of all endpoints. Not thread-safe.

    Args:
        gateway: the gateway, if there is one.
    """

    def __init__(self, gateway: GatewaySettings | None) -> None:
        self._gateway = gateway
        self._claims: dict[Key, Claim] = {}
        self._by_name: dict[str, list[tuple[str, Key]]] = defaultdict(list)  # the oldest first
        self._in_namespace: dict[str, set[Key]] = defaultdict(set)

    def learn(self, key: Key, document: Object | None, namespace: Object | None) -> set[Key]:
        """Record an endpoint, and return the endpoints whose route may have changed.

        Args:
            key: the endpoint.
            document: its manifest; None if the endpoint does not exist.
            namespace: its namespace's object; None if unknown.
        """
        before = self._claims.get(key)
        now = None if document is None or _is_going(document) else _claim(key, document, _has_opted_in(namespace))
        if now == before:
            return set()
        names = {name for claim in (before, now) if claim and claim.holds for name in claim.names}
        owners = {name: self._owner(name) for name in names}
        self._put(key, before, now)
        moved = [name for name in names if self._owner(name) != owners[name]]
        return {key}.union(*([each for _, each in self._by_name.get(name, ())] for name in moved))

    def of(self, key: Key) -> Route | None:
        """Return the endpoint's route, or None if the endpoint is unknown, or needs no gateway and there is none."""
        claim = self._claims.get(key)
        if claim is None:
            return None
        if self._gateway is None:
            if claim.wish != "Enabled" and not claim.has_session:
                return None
            remedy = "install one with the Helm value gateway.enabled, or remove spec.routing"
            return Route("NoGateway", f"the operator is configured without a gateway; {remedy}")
        if claim.wish == "Disabled":
            return Route("Disabled", "spec.routing.gateway is Disabled")
        if not claim.opted_in:
            problem = f"the namespace has not opted in: it lacks the label {_LABEL}"
            if claim.wish:
                return Route("NamespaceNotOptedIn", f"{problem}; set it, or remove spec.routing.gateway")
            return Route("Disabled", f"{problem}, and spec.routing.gateway is absent")
        if not claim.names:
            return Route("NotAccepted", "the endpoint's names cannot be read; the condition Accepted says why")
        taken = [(name, owner) for name in claim.names if (owner := self._owner(name)) not in (None, key)]
        if taken:
            remedy = "set spec.model.servedNames to other names, or spec.routing.gateway to Disabled"
            conflicts = "; ".join(f"the name {name} belongs to {_owner_text(owner, key)}" for name, owner in taken)
            return Route("NameTaken", f"{conflicts}; {remedy}")
        return Route("Routed", "the gateway serves the endpoint", self._gateway)

    def secrets(self, namespace: str) -> list[str]:
        """Return the names of a namespace's Secrets with the API keys of endpoints that the gateway serves."""
        claims = (self._claims[key] for key in self._in_namespace.get(namespace, ()))
        served = (claim for claim in claims if claim.secret and (route := self.of(claim.key)) and route.gateway)
        return sorted({claim.secret for claim in served})

    def _owner(self, name: str) -> Key | None:
        claimants = self._by_name.get(name)
        return claimants[0][1] if claimants else None

    def _put(self, key: Key, before: Claim | None, now: Claim | None) -> None:
        if before and before.holds:
            for name in before.names:
                self._by_name[name].remove((before.created, key))
                if not self._by_name[name]:
                    del self._by_name[name]
        if now and now.holds:
            for name in now.names:
                bisect.insort(self._by_name[name], (now.created, key))
        if now:
            self._claims[key] = now
            self._in_namespace[key.namespace].add(key)
        elif before:
            del self._claims[key]
            self._in_namespace[key.namespace].discard(key)
            if not self._in_namespace[key.namespace]:
                del self._in_namespace[key.namespace]


def _claim(key: Key, document: Object, opted_in: bool) -> Claim:
    """Read a claim from a manifest, which may not match this release's schema."""
    routing = _part(document, "spec", "routing")
    session = isinstance(routing, Mapping) and bool(routing.get("sessionHeader"))
    return Claim(
        key,
        _text(document["metadata"].get("creationTimestamp")),
        _names(document),
        _text(_part(routing, "gateway")),
        opted_in,
        _text(_part(document, "spec", "auth", "apiKeysSecretRef", "name")),
        session,
    )


def _names(document: Object) -> tuple[str, ...]:
    served_names = _part(document, "spec", "model", "servedNames")
    if isinstance(served_names, list) and served_names:
        return tuple(dict.fromkeys(name for name in served_names if isinstance(name, str)))
    try:
        return (ModelSource.parse(_text(_part(document, "spec", "model", "source"))).served_name,)
    except ArgumentError:
        return ()


def _part(document: Any, *path: str) -> Any:
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_going(live: Object) -> bool:
    return "deletionTimestamp" in live["metadata"]


def _has_opted_in(namespace: Object | None) -> bool:
    if namespace is None or _is_going(namespace):
        return False
    label, value = OPT_IN
    return bool((namespace["metadata"].get("labels") or {}).get(label) == value)


def _owner_text(owner: Key | None, key: Key) -> str:
    if owner is not None and owner.namespace == key.namespace:
        return f"the older endpoint {owner.name}"
    return "an older endpoint"
