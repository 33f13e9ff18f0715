"""Facts → what should exist. Pure, and the only place where that is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import KIND, InferenceEndpoint
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.facts import Endpoint, Object
from stoker_operator.manifests.children import children
from stoker_operator.manifests.owner import Manifest, Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import Plan, plan


@dataclass(frozen=True)
class Decision:
    """What should exist for an endpoint.

    Attributes:
        owner: what its objects are called and tied to.
        parsed: the endpoint, where its spec can be read.
        plan: what its pods will be; None where the spec is refused.
        objects: what to apply. Empty where something is in the way: what runs already is left running then.
        violations: why the spec is refused.
        conflict: which object of another owner has the endpoint's name.
    """

    owner: Owner
    parsed: InferenceEndpoint | None = None
    plan: Plan | None = None
    objects: tuple[Manifest, ...] = ()
    violations: tuple[Violation, ...] = ()
    conflict: str = ""


def decide(endpoint: Endpoint, live: Mapping[str, Object], catalogue: Catalogue) -> Decision:
    """Decides what should exist for `endpoint`, beside the objects of its name that are `live`."""
    owner = Owner(endpoint.key.name, endpoint.key.namespace, endpoint.uid)
    parsed = None
    try:
        parsed = parse(endpoint.document)
        planned = plan(parsed.spec, catalogue)
        objects = children(owner, parsed.spec, planned)
    except Refused as refused:
        return Decision(owner, parsed, violations=refused.violations)
    conflict = next(filter(None, (_conflict(owner, each) for each in live.values())), "")
    return Decision(owner, parsed, planned, () if conflict else objects, conflict=conflict)


def is_ours(owner: Owner, live: Object) -> bool:
    """Whether `owner` controls the object."""
    return _controller(live).get("uid") == owner.uid


def _conflict(owner: Owner, live: Object) -> str:
    """What is said of an object that has the endpoint's name and is not the endpoint's."""
    if is_ours(owner, live):
        return ""
    what = f"{live['kind']} {owner.name}"
    controller = _controller(live)
    if (controller.get("kind"), controller.get("name")) == (KIND, owner.name):
        return f"{what} belongs to an earlier endpoint of this name; it is being deleted"
    whose = f"belongs to {controller['kind']} {controller['name']}" if controller else "was made by someone else"
    return f"{what} {whose} and is left alone; delete it, or give the endpoint another name"


def _controller(live: Object) -> Object:
    references = live["metadata"].get("ownerReferences", ())
    return next((each for each in references if each.get("controller")), {})
