"""Which pods an endpoint runs: those its spec was rendered to, until the spec changes. Pure.

    nothing restarts a model pod but its spec

A newer operator builds pods differently, and a newer catalogue names newer images. Neither may restart a model that
serves. So what a spec was rendered to is written beside it, into an annotation of the Deployment, and applied again
for as long as the spec means the same for pods. ``rollout.imageUpdates: Always`` takes the newest instead.

What does not concern pods may change meanwhile: how many there are, how they are replaced, the Service. Specs are
compared by what they mean, whatever version of the API they are written in: a field left out is the same as its
default, and a field that a later release adds means nothing until it is set.

Beside it stands the generation of the endpoint that the Deployment was made of: a replica that sees an older
one does not see the newest spec, and must not render it (`is_behind`).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.base import NOT_IN_PODS, Part
from stoker_operator.objects.facts import Endpoint, Object
from stoker_operator.objects.owner import GENERATION, Manifest, made_of
from stoker_operator.reconcile.drift import differs, owned_part

ANNOTATION: Final = "stoker.dev/rendered"

#: What of a spec no pod shows, in records of releases that compared specs as they were written; routing came after.
_NOT_OF_PODS: Final = ("replicas", "service", "networkPolicy", "monitoring", "routing")
_NOT_OF_PODS_IN_ROLLOUT: Final = ("maxSurge", "maxUnavailable", "imageUpdates")


@dataclass(frozen=True)
class Pinned:
    """The Deployment to apply.

    Attributes:
        deployment: it, with the pods that are to run.
        waiting: the image that would run if the spec changed, where it is another one than runs.
        differs: what would run if the spec changed is not what runs.
    """

    deployment: Manifest
    waiting: str = ""
    differs: bool = False


def pin(deployment: Manifest, live: Object | None, endpoint: Endpoint, spec: Spec, manager: str) -> Pinned:
    """The Deployment to apply, where `deployment` is what the spec is rendered to today and `live` is what there is.

    Args:
        deployment: as built by `manifests`.
        live: the workload's Deployment in the cluster.
        endpoint: whose it is.
        spec: the endpoint's.
        manager: our field manager.
    """
    spec_digest = digest(spec)
    today = deployment["spec"]["template"]
    before = None if spec.rollout.follows_images or live is None else _rendered(live, spec_digest, endpoint, manager)
    template = today if before is None else before
    metadata = deployment["metadata"]
    record = json.dumps({"spec": spec_digest, "template": template}, separators=(",", ":"), sort_keys=True)
    annotations = {**metadata.get("annotations", {}), ANNOTATION: record}
    pinned = _dated(
        {
            **deployment,
            "metadata": {**metadata, "annotations": annotations},
            "spec": {**deployment["spec"], "template": template},
        },
        live,
        endpoint,
        manager,
    )
    running, newer = image(pinned), image(deployment)
    return Pinned(pinned, newer if newer != running else "", template != today)


def is_behind(endpoint: Endpoint, live: Object) -> bool:
    """Whether the Deployment `live` was made of a newer spec than this one, so that this one is not the newest."""
    return made_of(live) > endpoint.generation


def _dated(pinned: Manifest, live: Object | None, endpoint: Endpoint, manager: str) -> Manifest:
    """The Deployment with the generation it is made of: that of the last one that said anything else of it."""
    if live is not None and made_of(live) <= endpoint.generation:
        same = _with_generation(pinned, made_of(live))
        if not differs(same, live, manager):
            return same
    return _with_generation(pinned, endpoint.generation)


def _with_generation(deployment: Manifest, generation: int) -> Manifest:
    metadata = deployment["metadata"]
    dated = {GENERATION: str(generation)} if generation else {}
    return {**deployment, "metadata": {**metadata, "annotations": {**metadata["annotations"], **dated}}}


def is_rendered(live: Object, endpoint: Endpoint, spec: Spec, manager: str) -> bool:
    """Whether the Deployment `live` is what the endpoint's present spec was rendered to."""
    return _rendered(live, digest(spec), endpoint, manager) is not None


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


def image(deployment: Object) -> str:
    """The image of the engine in a Deployment."""
    return str(engine(deployment)["image"])


def engine(deployment: Object) -> Mapping[str, Any]:
    """The engine's container in a Deployment."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    found: Mapping[str, Any] = next(each for each in containers if each["name"] == "engine")
    return found


def _rendered(live: Object, spec_digest: str, endpoint: Endpoint, manager: str) -> Any:
    """What the same spec was rendered to before; None where there is no such thing."""
    record = (live["metadata"].get("annotations") or {}).get(ANNOTATION)
    if record is None:
        # Made by a release that kept no record. What it applied for this generation is what runs.
        known = endpoint.status.get("observedGeneration") == endpoint.generation
        owned = owned_part(live, manager).get("spec", {}).get("template") if known else None
        return owned or None
    try:
        rendered = json.loads(record)
        same = rendered["spec"] == spec_digest or rendered["spec"] == _digest_as_written(
            endpoint.document.get("spec", {})
        )
        return rendered["template"] if same else None
    except (ValueError, TypeError, KeyError):
        return None  # not written by us
