"""Finds pods that run with outdated Secrets or ConfigMaps, which a container reads once, at its start. Pure.

Three kinds of object are ignored: the Secret of API keys, if the runtime follows its changes; the hub token's
Secret (``spec.model.tokenSecretRef``), which is used only for the download at the start; and objects that only
``spec.template`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.template import ENGINE_CONTAINER
from stoker_operator.objects.facts import OlderObject, Pod
from stoker_operator.runtimes.registry import runtime

#: Maximum clock skew tolerated between API servers and nodes.
_SKEW: Final = timedelta(seconds=5)
#: How long after a change of an object a kubelet may restart a container with the object's cached data. For a new pod,
#: the kubelet reads the object.
_CACHED: Final = timedelta(seconds=60)


class Reference(NamedTuple):
    """An object that a spec names.

    Attributes:
        field: path of the spec's field that names it.
        kind: Secret or ConfigMap.
    """

    field: str
    kind: str
    name: str


@dataclass(frozen=True)
class Version:
    """Times of an object.

    Attributes:
        changed: when its data was last written, see `of`.
    """

    created: datetime
    changed: datetime

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Version:
        """Read the times from an object's metadata.

        Field managers that own no data, for example because they set a label, are ignored. For a manager that owns
        data, the time of its last change of any field is used, because ``managedFields`` has no other.
        """
        created = datetime.fromisoformat(metadata["creationTimestamp"])
        written = [
            datetime.fromisoformat(entry["time"])
            for entry in metadata.get("managedFields") or ()
            if entry.get("time") and {"f:data", "f:binaryData"} & (entry.get("fieldsV1") or {}).keys()
        ]
        return cls(created, max((created, *written)))


def references(spec: Spec) -> tuple[Reference, ...]:
    """Return the objects that the engine's container reads once at its start, each with the first field naming it."""
    found = []
    template = spec.model.chat_template
    if template and template.config_map_key_ref:
        found.append(Reference("spec.model.chatTemplate", "ConfigMap", template.config_map_key_ref.name))
    if spec.auth and not runtime(spec.engine.runtime).reads_key_files:
        found.append(Reference("spec.auth.apiKeysSecretRef", "Secret", spec.auth.api_keys_secret_ref.name))
    for index, variable in enumerate(spec.engine.env or ()):
        source = variable.value_from
        if source and source.secret_key_ref:
            found.append(Reference(f"spec.engine.env[{index}]", "Secret", source.secret_key_ref.name))
        if source and source.config_map_key_ref:
            found.append(Reference(f"spec.engine.env[{index}]", "ConfigMap", source.config_map_key_ref.name))
    once: dict[tuple[str, str], Reference] = {}
    for each in found:
        once.setdefault((each.kind, each.name), each)
    return tuple(once.values())


def older(
    named: Iterable[Reference], version: Callable[[Reference], Version | None], pods: Iterable[Pod]
) -> tuple[OlderObject, ...]:
    """Return the objects that changed after pods read them.

    Args:
        named: the objects that the pods' spec names.
        version: returns when an object's data changed, or None if unknown or the object does not exist.
        pods: the workload's pods.
    """
    running = list(pods)
    found = []
    for each in named:
        known = version(each)
        behind = tuple(sorted(pod.name for pod in running if known and _is_behind(pod, known)))
        if known and behind:
            found.append(OlderObject(each.field, each.kind, each.name, known.changed, behind))
    return tuple(found)


def _is_behind(pod: Pod, version: Version) -> bool:
    """Return whether the pod's engine started with an earlier version of the object.

    If clock skew or the kubelet's cache leave both possible, a new pod is regarded as current and a restarted container
    as outdated. The remedy creates new pods, so its success is not reported as the same problem.
    """
    engine = next((each for each in pod.containers if each.name == ENGINE_CONTAINER), None)
    if engine is None or not engine.started:
        return False
    created, started = datetime.fromisoformat(pod.created), datetime.fromisoformat(engine.started)
    if created >= version.changed or (created >= version.changed - _SKEW and started >= version.changed):
        return False
    # A pod that is older than the object waited for it and then read it.
    is_first = version.changed - version.created < _SKEW
    return started < version.changed + (-_SKEW if is_first else _CACHED)
