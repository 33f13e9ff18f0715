"""The fields of the API server's objects that the gateway needs. Two extracts are equal if no such field has changed.

Other components write the status and the slices, so the code does not assume that any field exists or is valid.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from stoker_common.errors import ArgumentError
from stoker_common.model_source import ModelSource
from stoker_gateway.registry.addresses import netloc
from stoker_gateway.registry.model_registry import Phase, Scaling

#: Name of the entry in ``status.addresses`` by which the operator marks endpoints that the gateway serves.
ADDRESS: Final = "gateway"
#: Name of the port for requests in an endpoint's Service.
PORT: Final = "http"
#: Label with the name of a slice's Service.
SERVICE: Final = "kubernetes.io/service-name"
#: Maximum and default of ``holdSeconds``. The picker must answer before Envoy's maximum wait, an hour.
MAX_HOLD_S: Final = 3570.0
DEFAULT_HOLD_S: Final = 300.0
#: Maximum number of characters of a drain id, and of the reason of a failed start.
_MAX_DRAIN_ID: Final = 253
_MAX_REASON: Final = 1024


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """An InferenceEndpoint that the gateway serves.

    Attributes:
        generation: generation of its spec.
        created: creation time in seconds since 1970; infinity if it is unknown.
        served_names: served names of its model.
        session_header: name in lower case of the header that identifies a session; None if there is none.
        secret: name of the Secret with the API keys of its pods; None means that its pods need no key.
        speaks_tls: whether its pods serve HTTPS.
        scaling: how the operator scales it; None if the operator does not scale it.
        is_scaled_externally: whether an autoscaler may set its number of replicas, because no manifest sets it.
    """

    namespace: str
    name: str
    generation: int
    created: float
    served_names: tuple[str, ...]
    session_header: str | None = None
    secret: str | None = None
    speaks_tls: bool = False
    scaling: Scaling | None = None
    is_scaled_externally: bool = False


@dataclass(frozen=True, slots=True)
class SliceFacts:
    """An EndpointSlice.

    Attributes:
        namespace, service: Service of the pods.
        servers: UID (or else IP) and ``IP:PORT`` of each ready pod.
        starting: the same for pods that are neither ready nor terminating.
    """

    namespace: str
    service: str
    servers: tuple[tuple[str, str], ...]
    starting: tuple[tuple[str, str], ...] = ()


def read_endpoint(manifest: Mapping[str, Any]) -> EndpointFacts | None:
    """Return the facts of an InferenceEndpoint; None if the gateway does not serve it."""
    metadata, spec, status = (_mapping(manifest.get(part)) for part in ("metadata", "spec", "status"))
    if not any(address.get("name") == ADDRESS for address in _mappings(status.get("addresses"))):
        return None
    names = _served_names(_mapping(spec.get("model")))
    if not names:
        return None
    header = _mapping(spec.get("routing")).get("sessionHeader")
    secret = _mapping(_mapping(spec.get("auth")).get("apiKeysSecretRef")).get("name")
    generation = metadata.get("generation")
    namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
    return EndpointFacts(
        namespace=namespace,
        name=name,
        generation=generation if isinstance(generation, int) else 0,
        created=_moment(metadata.get("creationTimestamp")),
        served_names=names,
        session_header=header.lower() if isinstance(header, str) and header else None,
        secret=secret if isinstance(secret, str) and secret else None,
        speaks_tls=str(status.get("url", "")).startswith("https:"),
        scaling=_scaling(namespace, name, spec.get("scaling"), _mapping(status.get("scaling"))),
        is_scaled_externally=_is_scaled_externally(metadata),
    )


def read_slice(manifest: Mapping[str, Any]) -> SliceFacts | None:
    """Return the facts of an EndpointSlice; None if it has no Service, no port for requests or no usable pod."""
    metadata = _mapping(manifest.get("metadata"))
    service = _mapping(metadata.get("labels")).get(SERVICE)
    port = next((each.get("port") for each in _mappings(manifest.get("ports")) if each.get("name") == PORT), None)
    if not isinstance(service, str) or not isinstance(port, int) or not 0 < port < 65536:
        return None
    servers, starting = list[tuple[str, str]](), list[tuple[str, str]]()
    for each in _mappings(manifest.get("endpoints")):
        conditions = _mapping(each.get("conditions"))
        if conditions.get("terminating") is True:
            continue
        addresses = each.get("addresses")
        host = (
            _ip(addresses[0]) if isinstance(addresses, list) and addresses else None
        )  # further addresses belong to the same pod
        if host is not None:
            pod = _mapping(each.get("targetRef")).get("uid")
            found = starting if conditions.get("ready") is False else servers
            found.append((pod if isinstance(pod, str) else host, netloc(host, port)))
    if not servers and not starting:
        return None
    namespace = str(metadata.get("namespace", ""))
    return SliceFacts(namespace, service, tuple(sorted(servers)), tuple(sorted(starting)))


def read_key(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the parts of a Secret that define a client's key."""
    metadata = _mapping(manifest.get("metadata"))
    kept = {part: metadata[part] for part in ("name", "labels", "deletionTimestamp") if part in metadata}
    return {"metadata": kept, "type": manifest.get("type"), "data": manifest.get("data")}


def _scaling(namespace: str, name: str, spec: object, status: Mapping[str, Any]) -> Scaling | None:
    """Return how the operator scales an endpoint; None if it does not. An invalid phase must not stop traffic, so it is
    treated as `Phase.ACTIVE`."""
    if not isinstance(spec, Mapping):
        return None
    hold, phase = spec.get("holdSeconds"), Phase.ACTIVE
    if not isinstance(hold, int | float) or isinstance(hold, bool) or not hold >= 0:
        hold = DEFAULT_HOLD_S
    drain = _text(status.get("drain"))
    drain = drain if len(drain) <= _MAX_DRAIN_ID else ""
    with suppress(ValueError):
        phase = Phase(status.get("phase"))
    if phase is Phase.DRAINING and not drain:
        phase = Phase.ACTIVE  # without an id the gateway could not acknowledge the drain
    failure = _text(status.get("startFailure"))[:_MAX_REASON].strip()
    return Scaling(namespace, name, float(min(hold, MAX_HOLD_S)), phase, drain, failure)


def _is_scaled_externally(metadata: Mapping[str, Any]) -> bool:
    """Whether no manifest sets ``spec.replicas``: its managers, if any, use the scale subresource, as autoscalers do.
    False without ``managedFields``.

    The API server forgets the field's managers when a Scale object with 0 replicas is written, which omits the number.
    It then does not record later writes through the scale subresource.
    """
    entries = list(_mappings(metadata.get("managedFields")))
    managers = [each for each in entries if "f:replicas" in _mapping(_mapping(each.get("fieldsV1")).get("f:spec"))]
    return bool(entries) and all(each.get("subresource") == "scale" for each in managers)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _served_names(model: Mapping[str, Any]) -> tuple[str, ...]:
    names = model.get("servedNames")
    if isinstance(names, list) and names:
        return tuple(dict.fromkeys(each for each in names if isinstance(each, str) and each))
    try:
        return (ModelSource.parse(str(model.get("source", ""))).served_name,)
    except ArgumentError:
        return ()


def _moment(text: object) -> float:
    """Return a timestamp in seconds since 1970; infinity (the newest) if it is invalid."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return float("inf")
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _ip(address: object) -> str | None:
    try:
        found = ipaddress.ip_address(str(address))
    except ValueError:
        return None
    return None if found.is_unspecified or found.is_multicast or "%" in str(found) else str(found)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    return (each for each in value if isinstance(each, Mapping)) if isinstance(value, list) else iter(())
