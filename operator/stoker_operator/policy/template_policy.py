"""The restrictions on ``spec.template`` by the administrator's policy. No I/O.

The operator creates the pods, so without restrictions every author of endpoints could create any pod. Restricted
permits only the fields listed here: a field of a later Kubernetes version is refused until it has been reviewed. The
list prevents:

    privileges on the node    host namespaces, host paths, host ports, privileged containers, capabilities, root,
                              unsafe profiles and sysctls: what Kubernetes' Pod Security Standard "restricted" forbids
    another identity          service accounts and their tokens
    precedence over pods      priority, and a node name, which bypasses the scheduler

A value is permitted if the standard permits it in all versions from Kubernetes 1.31, the oldest that the chart
supports, to 1.37. What the template omits comes from `manifests`, which follows the standard. The operator does not
complete the containers that a template adds, so these must state what the standard requires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from stoker_operator.api.v1alpha1.template import ENGINE_CONTAINER, PodTemplate
from stoker_operator.api.violation import Violation
from stoker_operator.policy.policy import TemplateUse

PATH: Final = "spec.template"

#: Fields of a pod that are permitted with any value; fields whose values are checked are not listed.
_POD: Final = frozenset({
    "activeDeadlineSeconds", "affinity", "dnsConfig", "dnsPolicy", "enableServiceLinks", "hostAliases", "hostname",
    "hostUsers", "imagePullSecrets", "nodeSelector", "readinessGates", "resourceClaims", "resources", "restartPolicy",
    "runtimeClassName", "schedulerName", "schedulingGates", "setHostnameAsFQDN", "shareProcessNamespace", "subdomain",
    "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints",
})  # fmt: skip
#: Fields of a pod that must be false or absent.
_POD_FALSE: Final = ("hostNetwork", "hostPID", "hostIPC", "automountServiceAccountToken")
#: Fields of a container that are permitted with any value.
_CONTAINER: Final = frozenset({
    "name", "image", "imagePullPolicy", "command", "args", "workingDir", "env", "envFrom", "resources", "resizePolicy",
    "restartPolicy", "volumeMounts", "volumeDevices", "stdin", "stdinOnce", "tty", "terminationMessagePath",
    "terminationMessagePolicy",
})  # fmt: skip
#: Fields with which the operator restricts the pod or sets its identity; a null must not remove them.
_HARDENED: Final = frozenset({
    "serviceAccountName", "automountServiceAccountToken", "securityContext", "runAsNonRoot", "seccompProfile", "type",
    "allowPrivilegeEscalation", "capabilities", "drop",
})  # fmt: skip
#: Fields of a pod that the operator may set, so that a null would remove them.
_DEFAULTS: Final = frozenset({
    "affinity", "automountServiceAccountToken", "enableServiceLinks", "securityContext", "serviceAccountName",
    "tolerations",
})  # fmt: skip
_PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe")
_VOLUMES: Final = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
)
_PROJECTED: Final = frozenset({"configMap", "downwardAPI", "secret", "clusterTrustBundle"})
_SYSCTLS: Final = frozenset({
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes",
})  # fmt: skip
_SELINUX_TYPES: Final = ("", "container_t", "container_init_t", "container_kvm_t")
_PROFILES: Final = ("RuntimeDefault", "Localhost")
_APPARMOR_ANNOTATION: Final = "container.apparmor.security.beta.kubernetes.io/"


def forbidden(template: PodTemplate, use: TemplateUse) -> tuple[Violation, ...]:
    """Return the violations of the policy by `template`.

    Args:
        use: which fields may be used.
    """
    if use == "Full":
        return ()
    if use == "None":
        stated = {"metadata": template.metadata.model_dump(exclude_none=True), "spec": _pruned(template.spec or {})}
        stated["spec"] = stated["spec"] or _DEFAULTS.intersection(template.spec or {})
        return tuple(
            _violation(f"{PATH}.{name}", "policy.template None permits no template", "remove it", "Restricted")
            for name, part in stated.items()
            if part
        )
    spec = template.spec or {}
    return (
        *_annotations(template.metadata.annotations or {}),
        *_pod(_pruned(spec), f"{PATH}.spec"),
        *_removals(spec, f"{PATH}.spec"),
    )


def _removals(pod: Mapping[str, Any], path: str) -> Iterator[Violation]:
    """Yield the violations by nulls that remove restrictions of the operator's pod."""
    parts: list[tuple[Any, str]] = [(pod, path)]
    for container, part_path in _items(pod.get("containers") or [], f"{path}.containers"):
        if _named_engine(container):
            parts.append((container, part_path))
    parts += [
        (part["securityContext"], f"{part_path}.securityContext")
        for part, part_path in parts
        if "securityContext" in part
    ]
    for part, part_path in parts[:]:
        if isinstance(part, Mapping):
            parts += [
                (part[name], f"{part_path}.{name}") for name in ("seccompProfile", "capabilities") if name in part
            ]
    for part, part_path in parts:
        for name, value, field_path in _entries(part, part_path):
            if value is None and name in _HARDENED:
                yield _not(field_path, None, "remove the line")


def _annotations(annotations: Mapping[str, str]) -> Iterator[Violation]:
    for name, value in annotations.items():
        permitted = value in ("", "runtime/default") or value.startswith("localhost/")
        if name.startswith(_APPARMOR_ANNOTATION) and not permitted:
            yield _not(f"{PATH}.metadata.annotations[{name}]", value, "use runtime/default or localhost/PROFILE")


def _pod(pod: Any, path: str) -> Iterator[Violation]:
    for name, value, field_path in _entries(pod, path):
        if name in _POD_FALSE:
            if value is not False:
                yield _not(field_path, value, "set it to false")
        elif name == "securityContext":
            yield from _security_context(value, field_path, _POD_SECURITY)
        elif name in ("containers", "initContainers"):
            for container, item_path in _items(value, field_path):
                yield from _container(container, item_path, is_engine=name == "containers" and _named_engine(container))
        elif name == "volumes":
            for volume, item_path in _items(value, field_path):
                yield from _volume(volume, item_path)
        elif name not in _POD:
            yield _unlisted(field_path)
    yield from _not_objects(pod, path)


def _container(container: Any, path: str, *, is_engine: bool) -> Iterator[Violation]:
    """Yield the violations by a container.

    Args:
        container, path: the container, and its path in the manifest.
        is_engine: whether it is merged onto the engine's container, which already states what the standard requires.
    """
    for name, value, field_path in _entries(container, path):
        if name == "securityContext":
            yield from _security_context(value, field_path, _CONTAINER_SECURITY)
        elif name == "ports":
            for port, item_path in _items(value, field_path):
                if isinstance(port, Mapping) and port.get("hostPort", 0) != 0:
                    yield _not(f"{item_path}.hostPort", port["hostPort"], "use containerPort alone")
                yield from _not_objects(port, item_path)
        elif name in _PROBES:
            yield from _handler(value, field_path)
        elif name == "lifecycle":
            for _, handler, item_path in _entries(value, field_path):
                yield from _handler(handler, item_path)
            yield from _not_objects(value, field_path)
        elif name not in _CONTAINER:
            yield _unlisted(field_path)
    yield from _not_objects(container, path)
    security = container.get("securityContext", {}) if isinstance(container, Mapping) else None
    if not is_engine and isinstance(security, Mapping):
        field_path = f"{path}.securityContext"
        if "allowPrivilegeEscalation" not in security:
            yield _violation(
                f"{field_path}.allowPrivilegeEscalation", "policy.template Restricted requires it", "set it to false"
            )
        capabilities = security.get("capabilities", {})
        if isinstance(capabilities, Mapping) and "drop" not in capabilities:
            yield _violation(
                f"{field_path}.capabilities.drop", "policy.template Restricted requires it", "set it to [ALL]"
            )


def _handler(handler: Any, path: str) -> Iterator[Violation]:
    """Yield the violations by a handler. A host is forbidden: the kubelet sends probes from the node's network."""
    for name, value, field_path in _entries(handler, path):
        if name in ("httpGet", "tcpSocket"):
            if isinstance(value, Mapping) and value.get("host", "") != "":
                yield _not(f"{field_path}.host", value["host"], "remove it: the request then goes to the pod itself")
            yield from _not_objects(value, field_path)
    yield from _not_objects(handler, path)


def _volume(volume: Any, path: str) -> Iterator[Violation]:
    for name, value, field_path in _entries(volume, path):
        if name == "projected":
            sources = value.get("sources", []) if isinstance(value, Mapping) else value
            for source, source_path in _items(sources, f"{field_path}.sources"):
                for kind, _, kind_path in _entries(source, source_path):
                    if kind not in _PROJECTED:
                        yield _unlisted(kind_path)
                yield from _not_objects(source, source_path)
        elif name != "name" and name not in _VOLUMES:
            yield _unlisted(field_path)
    yield from _not_objects(volume, path)


def _is(permitted: bool | str) -> Callable[[Any], bool]:
    return lambda value: type(value) is type(permitted) and value == permitted


def _profile(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in _PROFILES


def _selinux(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.keys() <= {"level", "type", "user", "role"}
        and value.get("type", "") in _SELINUX_TYPES
        and not value.get("user")
        and not value.get("role")
    )


def _capabilities(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value.keys() <= {"add", "drop"}:
        return False
    drop, add = value.get("drop", ["ALL"]), value.get("add", [])
    return isinstance(drop, list) and isinstance(add, list) and "ALL" in drop and add in ([], ["NET_BIND_SERVICE"])


def _sysctls(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) and each.get("name") in _SYSCTLS for each in value)


def _anything(_value: Any) -> bool:
    return True


def _other_than_root(value: Any) -> bool:
    return type(value) is int and value > 0


#: Fields of a security context → whether a value is permitted, and the remedy for others.
_Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
_SECURITY: Final[_Rules] = {
    "runAsNonRoot": (_is(True), "set it to true"),
    "runAsUser": (_other_than_root, "use a user other than 0"),
    "runAsGroup": (_anything, ""),
    "seccompProfile": (_profile, "use type RuntimeDefault or Localhost"),
    "appArmorProfile": (_profile, "use type RuntimeDefault or Localhost"),
    "seLinuxOptions": (_selinux, "use only level, and type container_t, container_init_t or container_kvm_t"),
}
_POD_SECURITY: Final[_Rules] = {
    **_SECURITY,
    "fsGroup": (_anything, ""),
    "fsGroupChangePolicy": (_anything, ""),
    "supplementalGroups": (_anything, ""),
    "supplementalGroupsPolicy": (_anything, ""),
    "sysctls": (_sysctls, f"use those that are safe: {', '.join(sorted(_SYSCTLS))}"),
}
_CONTAINER_SECURITY: Final[_Rules] = {
    **_SECURITY,
    "allowPrivilegeEscalation": (_is(False), "set it to false"),
    "privileged": (_is(False), "set it to false"),
    "readOnlyRootFilesystem": (_anything, ""),
    "procMount": (_is("Default"), "use Default"),
    "capabilities": (_capabilities, "drop ALL, and add only NET_BIND_SERVICE"),
}


def _security_context(context: Any, path: str, rules: _Rules) -> Iterator[Violation]:
    for name, value, field_path in _entries(context, path):
        if name not in rules:
            yield _unlisted(field_path)
        elif not rules[name][0](value):
            yield _not(field_path, value, rules[name][1])
    yield from _not_objects(context, path)


def _named_engine(container: Any) -> bool:
    return isinstance(container, Mapping) and container.get("name") == ENGINE_CONTAINER


def _entries(node: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield the entries of `node` with their paths; nothing if it is not an object, which `_not_objects` reports."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield str(name), value, f"{path}.{name}"


def _not_objects(node: Any, path: str) -> Iterator[Violation]:
    if not isinstance(node, Mapping):
        yield Violation(path, f"the value is {_shown(node)}, not an object")


def _items(node: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the items of a list with their paths. Another value is yielded as an item, so that it is also checked."""
    for index, item in enumerate(node if isinstance(node, list) else [node]):
        yield item, f"{path}[{index}]"


def _unlisted(path: str) -> Violation:
    return _violation(path, "policy.template Restricted does not permit this", "remove it")


def _not(path: str, value: Any, remedy: str) -> Violation:
    return _violation(path, f"policy.template Restricted does not permit {_shown(value)}", remedy)


def _violation(path: str, message: str, remedy: str, otherwise: TemplateUse = "Full") -> Violation:
    ask = f"ask an administrator to set the Helm chart's value policy.template to {otherwise}"
    return Violation(path, message, f"{remedy}, or {ask}", reason="TemplateNotPermitted")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _pruned(node: Any) -> Any:
    """Return `node` without null fields. A null matters only if it removes an operator's field (`_removals`)."""
    if isinstance(node, Mapping):
        return {key: _pruned(value) for key, value in node.items() if value is not None}
    if isinstance(node, list):
        return [_pruned(each) for each in node]
    return node
