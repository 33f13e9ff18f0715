"""What the gateway keeps of the API server's objects: frozen, small, and alike when nothing that matters here changed.

Status and slices are written by others, so nothing here takes it for granted that a field is there.
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

#: The entry of ``status.addresses`` by which the operator says that the gateway serves an endpoint.
ADDRESS: Final = "gateway"
#: The port of an endpoint's Service that answers requests.
PORT: Final = "http"
#: The label that says which Service a slice is of.
SERVICE: Final = "kubernetes.io/service-name"
#: The longest that a request is held, and the ``holdSeconds`` of an endpoint that does not say it. Envoy waits for one
#: decision for at most an hour, and the answer must come before.
MAX_HOLD_S: Final = 3570.0
DEFAULT_HOLD_S: Final = 300.0
#: Characters of an announcement's word, and of the reason why a start failed, at most.
_MAX_WORD: Final = 253
_MAX_REASON: Final = 1024


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """An InferenceEndpoint that the gateway serves.

    Attributes:
        generation: of its spec.
        created: seconds since 1970.
        served_names: of its model.
        session_header: in lower case.
        secret: the name of the Secret with the keys that its pods want; None: they want none.
        speaks_tls: whether its pods serve HTTPS.
        scaling: how the operator scales it; None: it does not.
        is_scaled_externally: whether another autoscaler does, as far as is known.
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
        namespace, service: whose pods these are.
        servers: pods that take requests, each by what tells it from others, and its ``IP:PORT``.
        starting: pods that are not ready yet, in the same form.
    """

    namespace: str
    service: str
    servers: tuple[tuple[str, str], ...]
    starting: tuple[tuple[str, str], ...] = ()


def read_endpoint(manifest: Mapping[str, Any]) -> EndpointFacts | None:
    """An InferenceEndpoint; None where the operator has not said that the gateway serves it."""
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
        is_scaled_externally=_is_scaled_externally(spec, metadata),
    )


def read_slice(manifest: Mapping[str, Any]) -> SliceFacts | None:
    """An EndpointSlice; None where it is of no Service, or has no pod to send requests to."""
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
        host = _ip(addresses[0]) if isinstance(addresses, list) and addresses else None  # the others say the same
        if host is not None:
            pod = _mapping(each.get("targetRef")).get("uid")
            found = starting if conditions.get("ready") is False else servers
            found.append((pod if isinstance(pod, str) else host, netloc(host, port)))
    if not servers and not starting:
        return None
    namespace = str(metadata.get("namespace", ""))
    return SliceFacts(namespace, service, tuple(sorted(servers)), tuple(sorted(starting)))


def read_key(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The Secret of a client's key, without what says nothing of the key."""
    metadata = _mapping(manifest.get("metadata"))
    kept = {part: metadata[part] for part in ("name", "labels", "deletionTimestamp") if part in metadata}
    return {"metadata": kept, "type": manifest.get("type"), "data": manifest.get("data")}


def _scaling(namespace: str, name: str, spec: object, status: Mapping[str, Any]) -> Scaling | None:
    """How an endpoint is scaled. A status that makes no sense stops no traffic: it counts as `Phase.ACTIVE`."""
    if not isinstance(spec, Mapping):
        return None
    hold, phase = spec.get("holdSeconds"), Phase.ACTIVE
    if not isinstance(hold, int | float) or isinstance(hold, bool) or not hold >= 0:
        hold = DEFAULT_HOLD_S
    drain = _text(status.get("drain"))
    drain = drain if len(drain) <= _MAX_WORD else ""
    with suppress(ValueError):
        phase = Phase(status.get("phase"))
    if phase is Phase.DRAINING and not drain:
        phase = Phase.ACTIVE  # nothing could be acknowledged
    failure = _text(status.get("startFailure"))[:_MAX_REASON].strip()
    return Scaling(namespace, name, float(min(hold, MAX_HOLD_S)), phase, drain, failure)


def _is_scaled_externally(spec: Mapping[str, Any], metadata: Mapping[str, Any]) -> bool:
    """Whether an autoscaler (KEDA, a HorizontalPodAutoscaler) has set ``spec.replicas``, through the scale subresource.

    The API server records the owner of the field, except of a 0 from the scale subresource, which a Scale object leaves
    out. So a 0 without an owner is an autoscaler's, or a person's by ``kubectl scale``.
    """
    entries = list(_mappings(metadata.get("managedFields")))
    if any(
        each.get("subresource") == "scale" and not _text(each.get("manager")).startswith("kubectl") for each in entries
    ):
        return True
    owned = (_mapping(_mapping(each.get("fieldsV1")).get("f:spec")) for each in entries)
    return spec.get("replicas") == 0 and bool(entries) and not any("f:replicas" in each for each in owned)


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
    """Seconds since 1970; what says none is younger than all that do."""
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
