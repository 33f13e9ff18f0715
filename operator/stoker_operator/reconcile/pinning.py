"""Pins pod templates: until its spec changes, an endpoint keeps the templates to which it was first rendered. Pure.

    the operator replaces a model's pods only if the spec changes

A newer operator builds pods differently, and a newer catalogue names newer images. Neither may restart a running model.
So the rendered templates are recorded in an annotation of each object that runs pods, and applied again as long as the
spec means the same for these pods. ``rollout.imageUpdates: Always`` uses the newest templates instead. The
annotation is JSON: ``spec``, the spec's digest; ``template``, the pod template, and ``further`` ones if an object has
several; ``components``, the templates of the workload's other objects if it has several; ``plan``, the model's
placement in these pods, which earlier releases did not write.

Other fields may change meanwhile: the number of pods, the rollout strategy, the Service. Specs are compared by meaning,
in whichever version of the API they are written: an absent field equals its default, and a field that a later release
adds is ignored until it is set.

A second annotation has the endpoint's generation that last changed the object: an operator replica that sees an older
generation has a stale spec and must not render it (`is_behind`).
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

#: Fields of a spec that early releases omitted from the digest because they do not affect pods, and such fields that
#: later releases added.
_NOT_OF_PODS: Final = ("replicas", "service", "networkPolicy", "monitoring", "routing", "scaling")
_NOT_OF_PODS_IN_ROLLOUT: Final = ("maxSurge", "maxUnavailable", "imageUpdates")


@dataclass(frozen=True)
class Pinned:
    """The result of pinning a workload.

    Attributes:
        objects: the objects to apply that run pods, with the pod templates to run.
        template: template of the pods that answer the workload's requests.
        plan: the model's placement in these pods, see `placement_numbers`; empty if unknown, for pods that an earlier
            release of the operator created.
        waiting: the image that pods get with the next change of the spec; empty if it is the running one.
        differs: whether today's rendering of the spec differs from `objects` in a template.
    """

    objects: tuple[Manifest, ...]
    template: Manifest
    plan: Mapping[str, int]
    waiting: str = ""
    differs: bool = False


class _Record(NamedTuple):
    """The recorded result of rendering a spec.

    Attributes:
        templates: the pod templates of one object.
        plan: as in `Pinned`.
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
    """Return the objects to apply, with recorded pod templates where they are still valid.

    Args:
        objects: the workload's objects that run pods, as `manifests` renders them today.
        placement: the model's placement in pods that are rendered today.
        live: the endpoint's objects in the cluster.
        manager: the operator's field manager.
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
    """Return the record with the templates that one of a workload's objects must run.

    An object without a valid record gets the templates that another object of the workload recorded for it, if any, so
    that all pods of a replica come from the same release of the operator.
    """
    before = records.get(child)
    if before is None:
        others = (each for each in records.values() if each.components.get(child.component))
        other = next(others, None)
        before = _Record(tuple(other.components[child.component]), other.plan) if other else None
    return today if before is None or before.templates == today.templates else before


def _with_record(
    rendered: Manifest, kind: WorkloadKind, records: Mapping[Child, _Record], spec_digest: str
) -> Manifest:
    """Return the object with the templates of its record, and with the record as an annotation."""
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
    """Return the model's placement over a replica's accelerators, as status and records contain it."""
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
    """Return whether a newer generation than `endpoint` has changed `live`, so that `endpoint` is stale."""
    return made_of(live) > endpoint.generation


def _dated(pinned: Manifest, live: Object | None, endpoint: Endpoint, manager: str) -> Manifest:
    """Return the object with an annotation of the generation that last changed it."""
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
    """Return whether the object `live` was rendered from the workload's current spec."""
    return _recorded(live, workload, digest(workload.spec), endpoint, manager) is not None


def digest(spec: Spec) -> str:
    """Return a digest of the fields of a spec that affect pods: 16 hexadecimal digits."""
    spec_fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=_not_in_pods(Spec))
    return _hash({name: value for name, value in spec_fields.items() if value != {}})


@functools.cache
def _not_in_pods(part: type[Part]) -> dict[str, Any]:
    """Return the fields that do not affect pods, in the form of pydantic's `exclude`."""
    found: dict[str, Any] = {}
    for name, field in part.model_fields.items():
        if NOT_IN_PODS in field.metadata:
            found[name] = True
        else:
            # A nested part, required or optional: exclude its fields and keep whether it is present.
            kinds = (field.annotation, *get_args(field.annotation))
            inner = next((each for each in kinds if isinstance(each, type) and issubclass(each, Part)), None)
            below = _not_in_pods(inner) if inner else {}
            found |= {name: below} if below else {}
    return found


def _digest_as_written(spec: Mapping[str, Any]) -> str:
    """Return the digest that early releases recorded, which compared specs literally."""
    about = {name: value for name, value in spec.items() if name not in _NOT_OF_PODS}
    if "rollout" in about:
        about["rollout"] = {k: v for k, v in about["rollout"].items() if k not in _NOT_OF_PODS_IN_ROLLOUT}
        if not about["rollout"]:
            del about["rollout"]
    return _hash(about)


def _hash(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def image(template: Object) -> str:
    """Return the engine's image in pods of this template."""
    return str(engine(template)["image"])


def engine(template: Object) -> Mapping[str, Any]:
    """Return the engine's container in pods of this template."""
    found: Mapping[str, Any] = next(each for each in template["spec"]["containers"] if each["name"] == ENGINE_CONTAINER)
    return found


def _recorded(live: Object, workload: Workload, spec_digest: str, endpoint: Endpoint, manager: str) -> _Record | None:
    """Return the record of an earlier rendering of the same spec, or None if there is none."""
    record = (live["metadata"].get("annotations") or {}).get(ANNOTATION)
    if record is None:
        # Created by a release without records. The fields that it applied for this generation are the record.
        known = endpoint.status.get("observedGeneration") == endpoint.generation
        part = owned_part(live, manager) if known else {}
        owned = workload.kind.templates(part) if part else ()
        return _Record(owned, {}) if owned else None
    try:
        rendered = json.loads(record)
        same = rendered["spec"] in (spec_digest, _digest_as_written(endpoint.document.get("spec", {})))
        templates = (rendered["template"], *rendered.get("further", ()))
        is_complete = len(templates) == len(workload.kind.templates(live))
        record = _Record(templates, _numbers(rendered.get("plan")), dict(rendered.get("components") or {}))
        return record if same and is_complete else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # not written by the operator


def _numbers(plan: Any) -> dict[str, int]:
    """Return the recorded plan; empty if it is missing or invalid."""
    is_plan = isinstance(plan, dict) and all(isinstance(number, int) for number in plan.values())
    return plan if is_plan and {"tensor", "pipeline", "data"} <= plan.keys() else {}
