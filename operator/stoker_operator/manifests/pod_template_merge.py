"""Merges a user's pod template (the patch) into the operator's (the base), by Kubernetes' strategic merge.

    maps                    merged key by key; the patch wins
    lists of keyed items    merged by key (`_KEYS`); new items follow the base's
    other lists, values     replaced by the patch's
    null                    removes the base's value, for example of a security context that the cluster fills in

A null has no effect on lists of keyed items, on their keys, and on fields that the patch must not set.

The keys are those that core/v1 declares (``x-kubernetes-patch-merge-key``). Three rules differ from ``kubectl patch``,
each to preserve the meaning of both sides. First, a union keeps one member: a volume or a variable is replaced as a
whole; in a probe or hook, another handler replaces the base's, and fields such as periodSeconds stay. Second,
tolerations are added to the base's. Third, terms of required node affinity are combined, so that a node must satisfy
both sides.

The template cannot override a typed field of the spec: such a field is refused with the typed field's name. The API
server, which has the schema of a pod, validates the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stoker_operator.api.v1alpha1.template import ENGINE_CONTAINER
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.objects.owner import Manifest

PATH: Final = "spec.template.spec"

#: Fields that identify the items of a list, by the list's name.
_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
    "resourceClaims": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
#: Lists whose items are unions of several kinds.
_OF_KINDS: Final = ("volumes", "resourceClaims", "env")
#: Maps with one of several handlers.
_HANDLED: Final = ("livenessProbe", "readinessProbe", "startupProbe", "postStart", "preStop")
_HANDLERS: Final = frozenset(("exec", "grpc", "httpGet", "sleep", "tcpSocket"))

#: Fields of a term of node affinity.
_TERM: Final = ("matchExpressions", "matchFields")

#: Fields of the engine's container that a typed field of the spec sets.
_ENGINE_FIELDS: Final = {
    "image": "spec.engine.image",
    "imagePullPolicy": "spec.engine.imagePullPolicy",
    "command": "spec.engine.runtime",
    "args": "spec.engine.args",
    "env": "spec.engine.env",
    "resources": "spec.hardware.resources",
}
#: Fields of the pod that a typed field of the spec sets.
_POD_FIELDS: Final = {"terminationGracePeriodSeconds": "spec.rollout.drainSeconds"}
#: Fields of the engine's container that cannot be changed.
_ENGINE_FIXED: Final = {
    "terminationMessagePath": "with another value, the operator could not read why the engine ended",
    "terminationMessagePolicy": "with another value, the operator could not read why the engine ended",
}
#: Fields that null does not remove.
_KEPT: Final = frozenset((*_KEYS, *_KEYS.values(), *_ENGINE_FIELDS, *_POD_FIELDS, *_ENGINE_FIXED))


def merge_pod_spec(base: Manifest, patch: Mapping[str, Any]) -> Manifest:
    """Return the operator's pod `base` with `patch` merged into it.

    Raises:
        Refused: `patch` does not have the form of a pod, or sets a field that it must not override.
    """
    raw_patch, patch = patch, _pruned(patch, PATH)
    _refuse(patch, _POD_FIELDS, PATH)
    engine: Mapping[str, Any] = {}
    for index, container in enumerate(_list(patch.get("containers", []), f"{PATH}.containers")):
        if isinstance(container, Mapping) and container.get("name") == ENGINE_CONTAINER:
            engine = container
            engine_path = f"{PATH}.containers[{index}]"
            _refuse(container, _ENGINE_FIELDS, engine_path)
            for field, reason in _ENGINE_FIXED.items():
                if field in container:
                    raise _refused(f"{engine_path}.{field}", reason, "remove it")
    merged = _merge_maps(base, raw_patch, PATH)
    _keeps_port(base, engine)
    for kind in ("containers", "initContainers"):
        if kind in merged:
            merged[kind] = _with_protocols(_list(merged[kind], f"{PATH}.{kind}"), f"{PATH}.{kind}")
    if "tolerations" in base and "tolerations" in patch:
        merged["tolerations"] = base["tolerations"] + [
            each for each in patch["tolerations"] if each not in base["tolerations"]
        ]
    _require_both(merged, base, patch)
    return merged


def _merge(base: Any, patch: Any, name: str, path: str) -> Any:
    if isinstance(base, Mapping):
        patch = _map(patch, path)
        handlers = _HANDLERS & {key for key, value in patch.items() if value is not None}
        if name in _HANDLED and handlers:
            base = {key: value for key, value in base.items() if key not in _HANDLERS - handlers}
        return _merge_maps(base, patch, path)
    if isinstance(base, list):
        patch = _list(patch, path)
        return _merge_lists(base, patch, name, path) if name in _KEYS else _pruned(patch, path)
    return _pruned(patch, path)


def _merge_maps(base: Mapping[str, Any], patch: Mapping[str, Any], path: str) -> Manifest:
    merged = {**base}
    for key, value in patch.items():
        field_path = f"{path}.{key}"
        if value is None:
            if key not in _KEPT:
                merged.pop(key, None)
        else:
            merged[key] = _merge(base[key], value, key, field_path) if key in base else _pruned(value, field_path)
    return merged


def _merge_lists(base: list[Manifest], patch: list[Any], name: str, path: str) -> list[Manifest]:
    key = _KEYS[name]
    merged = {each[key]: each for each in base}
    for index, item in enumerate(patch):
        item_path = f"{path}[{index}]"
        item_key = _map(item, item_path).get(key)
        if not isinstance(item_key, str | int):
            raise _refused(item_path, f"the item lacks {key}", "set it")
        keeps = item_key in merged and name not in _OF_KINDS
        merged[item_key] = _merge_maps(merged[item_key], item, item_path) if keeps else _pruned(item, item_path)
    return list(merged.values())


def _require_both(merged: Manifest, base: Manifest, patch: Mapping[str, Any]) -> None:
    """Combine each term of the base with each of the patch: a side's terms are alternatives, and a node must satisfy
    one of each side."""
    base_terms, patch_terms = _terms(base), _terms(patch)
    if base_terms and patch_terms:
        required = merged["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        required["nodeSelectorTerms"] = [
            {kind: a.get(kind, []) + b.get(kind, []) for kind in _TERM if kind in a or kind in b}
            for a in base_terms
            for b in patch_terms
        ]


def _terms(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    path = PATH
    for step in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        path += f".{step}"
        spec = _map(spec.get(step, {}), path)
    path += ".nodeSelectorTerms"
    terms: list[Any] = _list(spec.get("nodeSelectorTerms", []), path)
    for index, term in enumerate(terms):
        for kind in _TERM:
            _list(_map(term, f"{path}[{index}]").get(kind, []), f"{path}[{index}].{kind}")
    return terms


def _with_protocols(containers: list[Any], path: str) -> list[Manifest]:
    """Return the containers with every port's protocol set, because server-side apply identifies ports by it too."""
    result = []
    for index, container in enumerate(containers):
        container_path = f"{path}[{index}]"
        raw_ports = _list(_map(container, container_path).get("ports", []), f"{container_path}.ports")
        ports = [_map(port, f"{container_path}.ports[{number}]") for number, port in enumerate(raw_ports)]
        written = [{**port, "protocol": port.get("protocol", "TCP")} for port in ports]
        result.append({**container, "ports": written} if ports else container)
    return result


def _keeps_port(base: Manifest, engine: Mapping[str, Any]) -> None:
    """Refuse changes of the engine port's name or protocol: Service, probes and monitors refer to the name."""
    engine_port = base["containers"][0]["ports"][0]
    for port in _list(engine.get("ports", []), f"{PATH}.containers[{ENGINE_CONTAINER}].ports"):
        same = port.get("containerPort") == engine_port["containerPort"]
        if same and any(engine_port.get(key) != value for key, value in port.items() if key in ("name", "protocol")):
            raise _refused(
                f"{PATH}.containers[{ENGINE_CONTAINER}].ports",
                f"port {engine_port['containerPort']} is the engine's; its name {engine_port['name']} and protocol "
                "cannot change",
                "use another port number",
            )


def _refuse(patch: Mapping[str, Any], fields: Mapping[str, str], path: str) -> None:
    for field in fields:
        if field in patch:
            raise _refused(f"{path}.{field}", f"{fields[field]} sets this field", f"set {fields[field]} instead")


def _pruned(node: Any, path: str) -> Any:
    """Return `node` without nulls, which have no effect where the base has no value; refuse directives."""
    if isinstance(node, Mapping):
        for key in node:
            if str(key).startswith("$"):
                raise _refused(
                    f"{path}.{key}", "this is a directive of kubectl patch and not a field of a pod", "remove it"
                )
        return {key: _pruned(value, f"{path}.{key}") for key, value in node.items() if value is not None}
    if isinstance(node, list):
        return [_pruned(value, f"{path}[{index}]") for index, value in enumerate(node)]
    return node


def _map(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(path, f"must be an object, not {value!r}")
    return value


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise _refused(path, f"must be a list, not {value!r}")
    return value


def _refused(path: str, message: str, remedy: str = "") -> Refused:
    return Refused(Violation(path, message, remedy))
