"""Which pods an endpoint runs: those its spec was rendered to, until the spec changes. Pure.

    nothing restarts a model pod but its spec

A newer operator builds pods differently, and a newer catalogue names newer images. Neither may restart a model that
serves. So what a workload's spec was rendered to is written beside it, into an annotation of each object that runs its
pods, and applied again for as long as the spec means the same for these pods. ``rollout.imageUpdates: Always`` takes
the newest instead. The annotation is JSON: ``spec``, the spec's digest; ``template``, the pod template, and ``further``
ones where an object has several; ``components``, the templates of the workload's other objects where it has several;
``plan``, how the model is spread in these pods, which earlier releases did not write.

What does not concern pods may change meanwhile: how many there are, how they are replaced, the Service. Specs are
compared by what they mean, whatever version of the API they are written in: a field left out is the same as its
default, and a field that a later release adds means nothing until it is set.

Beside it stands the generation of the endpoint that the object was made of: a replica that sees an older
one does not see the newest spec, and must not render it (`is_behind`).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, get_args

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.base import NOT_IN_PODS, Part
from stoker_operator.api.v1alpha1.template import ENGINE_CONTAINER
from stoker_operator.objects.facts import Child, Endpoint, Object
from stoker_operator.objects.owner import GENERATION, Manifest, made_of
from stoker_operator.plan.placement import Placement
from stoker_operator.reconcile.drift import differs, owned_part
from stoker_operator.workloads.composition import Workload
from stoker_operator.workloads.kind import WorkloadKind

ANNOTATION: Final = "stoker.dev/rendered"

#: What of a spec no pod shows, in records of releases that compared specs as they were written; routing and scaling
#: came after.
_NOT_OF_PODS: Final = ("replicas", "service", "networkPolicy", "monitoring", "routing", "scaling")
_NOT_OF_PODS_IN_ROLLOUT: Final = ("maxSurge", "maxUnavailable", "imageUpdates")


@dataclass(frozen=True)
class Pinned:
    """The objects of a workload to apply.

    Attributes:
        objects: they, with the pods that are to run.
        template: the pods among these that answer the workload's requests.
        plan: how the model is spread in them, as `placement_numbers` has it; empty where that is not known, of pods
            that an earlier release of the operator made.
        waiting: the image that would run if the spec changed, where it is another one than runs.
        differs: what would run if the spec changed is not what runs.
    """

    objects: tuple[Manifest, ...]
    template: Manifest
    plan: Mapping[str, int]
    waiting: str = ""
    differs: bool = False


class _Record(NamedTuple):
    """What a spec was rendered to.

    Attributes:
        templates: the pod templates of one object.
        plan: as of `Pinned`.
        components: the pod templates of the workload's other objects, by component.
    """

    templates: tuple[Manifest, ...]
    plan: Mapping[str, int]
    components: Mapping[str, Sequence[Manifest]] = {}


def pin(
    objects: Sequence[Manifest],
    workload: Workload,
    placement: Placement,
    live: Mapping[Child, Object],
    endpoint: Endpoint,
    manager: str,
) -> Pinned:
    """The objects to apply, where `objects` are what the spec is rendered to today and `live` is what there is.

    Args:
        objects: those of the workload that run its pods, as built by `manifests`.
        workload: whose they are.
        placement: how the model is spread in pods that are rendered today.
        live: the endpoint's objects in the cluster.
        endpoint: the endpoint.
        manager: our field manager.
    """
    kind, spec_digest, numbers = workload.kind, digest(workload.spec), placement_numbers(placement)
    today = {Child.of(each): _Record(kind.templates(each), numbers) for each in objects}
    records: dict[Child, _Record] = {}
    if not workload.spec.rollout.follows_images:
        found = {
            child: _recorded(live[child], workload, spec_digest, endpoint, manager) for child in today if child in live
        }
        records = {child: record for child, record in found.items() if record}
    kept = {child: _kept(child, records, each) for child, each in today.items()}
    pinned = tuple(
        _dated(_with_record(each, kind, kept, spec_digest), live.get(Child.of(each)), endpoint, manager)
        for each in objects
    )
    main = Child.of(objects[0])
    running, newer = image(kept[main].templates[0]), image(today[main].templates[0])
    return Pinned(
        pinned,
        kept[main].templates[0],
        kept[main].plan,
        newer if newer != running else "",
        any(kept[child].templates != each.templates for child, each in today.items()),
    )


def _kept(child: Child, records: Mapping[Child, _Record], today: _Record) -> _Record:
    """What one of a workload's objects is to run. Where it has no record, since it was deleted or not yet written, that
    of another object of the workload counts: pods of a replica are of one release of the operator."""
    before = records.get(child)
    if before is None:
        others = (each for each in records.values() if each.components.get(child.component))
        other = next(others, None)
        before = _Record(tuple(other.components[child.component]), other.plan) if other else None
    return today if before is None or before.templates == today.templates else before


def _with_record(
    rendered: Manifest, kind: WorkloadKind, records: Mapping[Child, _Record], spec_digest: str
) -> Manifest:
    """The object with the pods of its record, and with the annotation that keeps it."""
    record = records[Child.of(rendered)]
    entry: dict[str, Any] = {"spec": spec_digest, "template": record.templates[0]}
    if len(record.templates) > 1:
        entry["further"] = record.templates[1:]
    others = {child.component: each.templates for child, each in records.items() if each is not record}
    if others:
        entry["components"] = others
    if record.plan:
        entry["plan"] = dict(record.plan)
    text = json.dumps(entry, separators=(",", ":"), sort_keys=True)
    metadata = rendered["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION: text}
    return {**kind.with_templates(rendered, record.templates), "metadata": {**metadata, "annotations": annotations}}


def placement_numbers(placement: Placement) -> dict[str, int]:
    """How the model is spread over the accelerators of a replica, as status and records have it."""
    numbers: dict[str, int | None] = {
        "tensor": placement.tensor,
        "pipeline": placement.pipeline,
        "data": placement.data,
        "expert": placement.tensor * placement.data if placement.expert else None,
        "nodes": placement.nodes,
        "idle": placement.idle,
    }
    return {name: number for name, number in numbers.items() if number is not None}


def is_behind(endpoint: Endpoint, live: Object) -> bool:
    """Whether the object `live` was made of a newer spec than this one, so that this one is not the newest."""
    return made_of(live) > endpoint.generation


def _dated(pinned: Manifest, live: Object | None, endpoint: Endpoint, manager: str) -> Manifest:
    """The object with the generation it is made of: that of the last one that said anything else of it."""
    if live is not None and made_of(live) <= endpoint.generation:
        same = _with_generation(pinned, made_of(live))
        if not differs(same, live, manager):
            return same
    return _with_generation(pinned, endpoint.generation)


def _with_generation(pinned: Manifest, generation: int) -> Manifest:
    metadata = pinned["metadata"]
    dated = {GENERATION: str(generation)} if generation else {}
    return {**pinned, "metadata": {**metadata, "annotations": {**metadata["annotations"], **dated}}}


def is_rendered(live: Object, endpoint: Endpoint, workload: Workload, manager: str) -> bool:
    """Whether the object `live` is what the workload's present spec was rendered to."""
    return _recorded(live, workload, digest(workload.spec), endpoint, manager) is not None


def digest(spec: Spec) -> str:
    """What a spec says about pods, in a few characters."""
    spec_fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=_not_in_pods(Spec))
    return _hash({name: value for name, value in spec_fields.items() if value != {}})


@functools.cache
def _not_in_pods(part: type[Part]) -> dict[str, Any]:
    """The fields that no pod shows, as pydantic's `exclude` takes them."""
    found: dict[str, Any] = {}
    for name, field in part.model_fields.items():
        if NOT_IN_PODS in field.metadata:
            found[name] = True
        else:
            # A part, or a part that may be absent: only whether it is there is said then.
            kinds = (field.annotation, *get_args(field.annotation))
            inner = next((each for each in kinds if isinstance(each, type) and issubclass(each, Part)), None)
            below = _not_in_pods(inner) if inner else {}
            found |= {name: below} if below else {}
    return found


def _digest_as_written(spec: Mapping[str, Any]) -> str:
    """The digest of releases that compared specs as they were written."""
    about = {name: value for name, value in spec.items() if name not in _NOT_OF_PODS}
    if "rollout" in about:
        about["rollout"] = {k: v for k, v in about["rollout"].items() if k not in _NOT_OF_PODS_IN_ROLLOUT}
        if not about["rollout"]:
            del about["rollout"]
    return _hash(about)


def _hash(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def image(template: Object) -> str:
    """The image of the engine in pods of this template."""
    return str(engine(template)["image"])


def engine(template: Object) -> Mapping[str, Any]:
    """The engine's container in pods of this template."""
    found: Mapping[str, Any] = next(each for each in template["spec"]["containers"] if each["name"] == ENGINE_CONTAINER)
    return found


def _recorded(live: Object, workload: Workload, spec_digest: str, endpoint: Endpoint, manager: str) -> _Record | None:
    """What the same spec was rendered to before; None where there is no such thing."""
    record = (live["metadata"].get("annotations") or {}).get(ANNOTATION)
    if record is None:
        # Made by a release that kept no record. What it applied for this generation is what runs.
        known = endpoint.status.get("observedGeneration") == endpoint.generation
        owned = workload.kind.templates(owned_part(live, manager)) if known else ()
        return _Record(owned, {}) if owned else None
    try:
        rendered = json.loads(record)
        same = rendered["spec"] in (spec_digest, _digest_as_written(endpoint.document.get("spec", {})))
        templates = (rendered["template"], *rendered.get("further", ()))
        is_complete = len(templates) == len(workload.kind.templates(live))
        record = _Record(templates, _numbers(rendered.get("plan")), dict(rendered.get("components") or {}))
        return record if same and is_complete else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # not written by us


def _numbers(plan: Any) -> dict[str, int]:
    """The recorded plan; empty where an earlier release kept none."""
    is_plan = isinstance(plan, dict) and all(isinstance(number, int) for number in plan.values())
    return plan if is_plan and {"tensor", "pipeline", "data"} <= plan.keys() else {}
