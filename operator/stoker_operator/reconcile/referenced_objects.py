"""Secrets and ConfigMaps that a spec names and that a container reads once, at its start: which of an endpoint's pods
run with an earlier state of one. Pure.

What pods follow by themselves does not count: the folder of keys of runtime stoker. Nor does the token of a hub
(``spec.model.tokenSecretRef``): it is used for the download at the start, and a pod that serves needs it no more. Nor
do objects that only ``spec.template`` names.
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

#: How far the clocks of API servers and of nodes may differ.
_SKEW: Final = timedelta(seconds=5)
#: For so long a kubelet may give a restarted container what it knew of an object before that changed (its cache). For a
#: new pod it reads the object.
_CACHED: Final = timedelta(seconds=60)


class Reference(NamedTuple):
    """An object that a spec names.

    Attributes:
        field: where the spec names it.
        kind: Secret or ConfigMap.
        name: the object's name.
    """

    field: str
    kind: str
    name: str


@dataclass(frozen=True)
class Version:
    """When an object got the data it has.

    Attributes:
        created: when it was created.
        changed: when its data was written last.
    """

    created: datetime
    changed: datetime

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Version:
        """As an object's metadata says it. A writer that owns nothing of the data, as one that sets a label, does not
        count; one that owns some of it counts whenever it changed anything of its own."""
        created = datetime.fromisoformat(metadata["creationTimestamp"])
        written = [
            datetime.fromisoformat(entry["time"])
            for entry in metadata.get("managedFields") or ()
            if entry.get("time") and {"f:data", "f:binaryData"} & (entry.get("fieldsV1") or {}).keys()
        ]
        return cls(created, max((created, *written)))


def references(spec: Spec) -> tuple[Reference, ...]:
    """The objects that the engine's container of `spec` reads once; each is listed once, by the first field."""
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
    """The objects of which pods run with an earlier state.

    Args:
        named: the objects that the pods' spec names.
        version: when each got its data; None: that is not known, or there is no such object.
        pods: the endpoint's pods.
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
    """Whether the pod's engine was started with what the object held before. Where clocks or the kubelet's cache leave
    both possible, a new pod is taken to have what is there, and a restarted container what was: the remedy makes new
    pods, so what it was applied for is not said again."""
    engine = next((each for each in pod.containers if each.name == ENGINE_CONTAINER), None)
    if engine is None or not engine.started:
        return False
    created, started = datetime.fromisoformat(pod.created), datetime.fromisoformat(engine.started)
    if created >= version.changed or (created >= version.changed - _SKEW and started >= version.changed):
        return False
    # A pod that was there before the object waited for it, and then read it.
    is_first = version.changed - version.created < _SKEW
    return started < version.changed + (-_SKEW if is_first else _CACHED)
