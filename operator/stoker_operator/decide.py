"""Facts → what should exist. Pure, and the only place where that is decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.api.violation import Violation
from stoker_operator.facts import Endpoint, Object
from stoker_operator.judge import Judgement
from stoker_operator.manifests.owner import Manifest, Owner
from stoker_operator.manifests.storage import sharing_problem
from stoker_operator.pinning import Pinned, pin

#: Objects that an endpoint may cease to want; the others stay as long as it does.
DISPENSABLE = ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy")


class Conflict(NamedTuple):
    """An object of another owner that has the endpoint's name.

    Attributes:
        message: whose it is, with the remedy.
        lasting: it will not go away by itself.
    """

    message: str
    lasting: bool = True


@dataclass(frozen=True)
class Decision:
    """What should exist for an endpoint.

    Attributes:
        owner: what its objects are called and tied to.
        judgement: what was made of its spec.
        objects: what to apply. Empty where something is in the way: what runs already is left running then.
        unwanted: objects of the endpoint that are to go.
        pinned: the Deployment among `objects`.
        conflict: what else has the endpoint's name.
    """

    owner: Owner
    judgement: Judgement
    objects: tuple[Manifest, ...] = ()
    unwanted: tuple[Object, ...] = ()
    pinned: Pinned | None = None
    conflict: Conflict | None = None


def decide(
    endpoint: Endpoint,
    owner: Owner,
    judgement: Judgement,
    live: Mapping[str, Object],
    access_modes: Sequence[str] | None,
    manager: str,
) -> Decision:
    """Decides what should exist for `endpoint`.

    Args:
        endpoint: the endpoint.
        owner: what its objects are called and tied to.
        judgement: what was made of its spec.
        live: the objects of its name that there are.
        access_modes: how the claim that its spec names may be mounted; None where there is none.
        manager: our field manager.
    """
    if judgement.violations or judgement.parsed is None:
        return Decision(owner, judgement)
    spec = judgement.parsed.spec
    problem = None if access_modes is None else sharing_problem(spec, access_modes)
    if problem:
        return Decision(owner, replace(judgement, refused=(problem,), objects=()))
    conflict = next(filter(None, (_conflict(owner, each) for each in live.values())), None)
    if conflict:
        return Decision(owner, judgement, conflict=conflict)
    rendered = {each["kind"]: each for each in judgement.objects}
    pinned = pin(rendered["Deployment"], live.get("Deployment"), endpoint, manager, newest=spec.rollout.follows_images)
    objects = tuple((rendered | {"Deployment": pinned.deployment}).values())
    unwanted = tuple(live[kind] for kind in DISPENSABLE if kind in live and kind not in rendered)
    return Decision(owner, judgement, objects, unwanted, pinned)


def refuse(decision: Decision, violation: Violation) -> Decision:
    """The decision, had `violation` been known."""
    return Decision(decision.owner, replace(decision.judgement, refused=(violation,), objects=()))


def is_ours(owner: Owner, live: Object) -> bool:
    """Whether `owner` controls the object."""
    return bool(_controller(live).get("uid") == owner.uid)


def _conflict(owner: Owner, live: Object) -> Conflict | None:
    if is_ours(owner, live):
        return None
    what = f"{live['kind']} {owner.name}"
    controller = _controller(live)
    if (controller.get("kind"), controller.get("name")) == (KIND, owner.name):
        return Conflict(f"{what} belongs to an earlier endpoint of this name; it is being deleted", lasting=False)
    whose = f"belongs to {controller['kind']} {controller['name']}" if controller else "was made by someone else"
    return Conflict(f"{what} {whose} and is left alone; delete it, or give the endpoint another name")


def _controller(live: Object) -> Object:
    references = live["metadata"].get("ownerReferences", ())
    return next((each for each in references if each.get("controller")), {})
