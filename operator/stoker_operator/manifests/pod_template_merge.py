"""A user's pod template laid over ours, by the rules of Kubernetes' strategic merge.

    maps                    merged key by key; theirs wins
    lists of named things   merged by name (`_KEYS`), new things behind ours
    other lists, values     theirs instead of ours
    null                    takes ours away, as from a security context that the cluster is to fill in

What has a field of its own, and lists of named things, stay as they are where theirs is null.

The names are those that core/v1 declares (``x-kubernetes-patch-merge-key``). Three things differ from what
``kubectl patch`` does, each to keep both sides' meaning. A thing that is one of several kinds is never two at a time: a
volume, or a variable, is replaced as a whole, as ``kubectl apply`` does; of a probe, or a hook, another kind replaces
ours, and its times stay. Tolerations are added to ours. Terms of required node affinity hold in addition to ours: a
pod goes where both allow it.

The template cannot override a typed field: such fields are refused, with the field's name. The rest is checked by the
API server, which has the schema of a pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stoker_operator.api.v1alpha1.template import ENGINE_CONTAINER
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.objects.owner import Manifest

PATH: Final = "spec.template.spec"

#: What identifies an item of a list.
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
#: Lists whose things are each of one of several kinds.
_OF_KINDS: Final = ("volumes", "resourceClaims", "env")
#: Maps that hold one of several handlers.
_HANDLED: Final = ("livenessProbe", "readinessProbe", "startupProbe", "postStart", "preStop")
_HANDLERS: Final = frozenset(("exec", "grpc", "httpGet", "sleep", "tcpSocket"))

#: What a term of node affinity says.
_TERM: Final = ("matchExpressions", "matchFields")

#: What of the engine's container has a field of its own.
_ENGINE_FIELDS: Final = {
    "image": "spec.engine.image",
    "imagePullPolicy": "spec.engine.imagePullPolicy",
    "command": "spec.engine.runtime",
    "args": "spec.engine.args",
    "env": "spec.engine.env",
    "resources": "spec.hardware.resources",
}
#: What of the pod has.
_POD_FIELDS: Final = {"terminationGracePeriodSeconds": "spec.rollout.drainSeconds"}
#: What of the engine's container cannot be otherwise.
_ENGINE_FIXED: Final = {
    "terminationMessagePath": "the operator reads there why the engine ended",
    "terminationMessagePolicy": "the operator reads there why the engine ended",
}
#: What null does not take away.
_KEPT: Final = frozenset((*_KEYS, *_KEYS.values(), *_ENGINE_FIELDS, *_POD_FIELDS, *_ENGINE_FIXED))


def merge_pod_spec(base: Manifest, patch: Mapping[str, Any]) -> Manifest:
    """Our pod with `patch` laid over it.

    Raises:
        Refused: `patch` is not of the form of a pod, or says what another field says.
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
            raise _refused(item_path, f"it has no {key}", "set it")
        keeps = item_key in merged and name not in _OF_KINDS
        merged[item_key] = _merge_maps(merged[item_key], item, item_path) if keeps else _pruned(item, item_path)
    return list(merged.values())


def _require_both(merged: Manifest, base: Manifest, patch: Mapping[str, Any]) -> None:
    """Node selector terms are alternatives, so both sides hold where each of ours is joined with each of theirs."""
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
    """The containers with every port's protocol written out: server-side apply identifies ports by it too."""
    result = []
    for index, container in enumerate(containers):
        container_path = f"{path}[{index}]"
        raw_ports = _list(_map(container, container_path).get("ports", []), f"{container_path}.ports")
        ports = [_map(port, f"{container_path}.ports[{number}]") for number, port in enumerate(raw_ports)]
        written = [{**port, "protocol": port.get("protocol", "TCP")} for port in ports]
        result.append({**container, "ports": written} if ports else container)
    return result


def _keeps_port(base: Manifest, engine: Mapping[str, Any]) -> None:
    """Service, probes and monitors find the engine by its port's name."""
    engine_port = base["containers"][0]["ports"][0]
    for port in _list(engine.get("ports", []), f"{PATH}.containers[{ENGINE_CONTAINER}].ports"):
        same = port.get("containerPort") == engine_port["containerPort"]
        if same and any(engine_port.get(key) != value for key, value in port.items() if key in ("name", "protocol")):
            raise _refused(
                f"{PATH}.containers[{ENGINE_CONTAINER}].ports",
                f"port {engine_port['containerPort']} is the engine's and called {engine_port['name']}",
                "use another number for another port",
            )


def _refuse(patch: Mapping[str, Any], fields: Mapping[str, str], path: str) -> None:
    for field in fields:
        if field in patch:
            raise _refused(f"{path}.{field}", f"{fields[field]} says this", f"set {fields[field]} instead")


def _pruned(node: Any, path: str) -> Any:
    """`node` without nulls, which say nothing where there is nothing of ours."""
    if isinstance(node, Mapping):
        for key in node:
            if str(key).startswith("$"):
                raise _refused(
                    f"{path}.{key}", "this is a directive of kubectl patch, and no field of a pod", "remove it"
                )
        return {key: _pruned(value, f"{path}.{key}") for key, value in node.items() if value is not None}
    if isinstance(node, list):
        return [_pruned(value, f"{path}[{index}]") for index, value in enumerate(node)]
    return node


def _map(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(path, f"this is {value!r}, where an object belongs")
    return value


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise _refused(path, f"this is {value!r}, where a list belongs")
    return value


def _refused(path: str, message: str, remedy: str = "") -> Refused:
    return Refused(Violation(path, message, remedy))
