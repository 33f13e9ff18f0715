"""Facts → what should exist. Pure, and the only place where that is decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.api.violation import Violation
from stoker_operator.facts import MAIN, Child, Endpoint, Object
from stoker_operator.judge import Judgement
from stoker_operator.manifests.owner import Manifest, Owner
from stoker_operator.manifests.storage import sharing_problem
from stoker_operator.pinning import Pinned, pin

#: Kinds of object that a workload may cease to want; the others stay as long as it does.
DISPENSABLE = ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy")


class Conflict(NamedTuple):
    """An object of another owner that has the name of one of the endpoint's.

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
        pinned: the Deployments among `objects`, by workload.
        conflict: what else has the name of one of its objects.
    """

    owner: Owner
    judgement: Judgement
    objects: tuple[Manifest, ...] = ()
    unwanted: tuple[Child, ...] = ()
    pinned: Mapping[str, Pinned] = field(default_factory=dict)
    conflict: Conflict | None = None


def decide(
    endpoint: Endpoint,
    owner: Owner,
    judgement: Judgement,
    live: Mapping[Child, Object],
    access_modes: Sequence[str] | None,
    manager: str,
) -> Decision:
    """Decides what should exist for `endpoint`.

    Args:
        endpoint: the endpoint.
        owner: what its objects are called and tied to.
        judgement: what was made of its spec.
        live: the objects that have the names of its own.
        access_modes: how the claim that its spec names may be mounted; None where there is none.
        manager: our field manager.
    """
    if judgement.violations or judgement.parsed is None:
        return Decision(owner, judgement)
    spec = judgement.parsed.spec
    problem = None if access_modes is None else sharing_problem(spec, access_modes)
    if problem:
        return Decision(owner, replace(judgement, refused=(problem,), objects=()))
    rendered = {Child.of(each): each for each in judgement.objects}
    workloads = {MAIN, *(child.workload for child in rendered)}
    named = (_conflict(owner, each) for child, each in live.items() if child.workload in workloads)
    conflict = next(filter(None, named), None)
    if conflict:
        return Decision(owner, judgement, conflict=conflict)
    pinned = {
        child.workload: pin(each, live.get(child), endpoint, spec, manager)
        for child, each in rendered.items()
        if child.kind == "Deployment"
    }
    objects = rendered | {Child("Deployment", workload): each.deployment for workload, each in pinned.items()}
    ours = (child for child, each in live.items() if is_ours(owner, each))
    unwanted = tuple(child for child in ours if _is_unwanted(child, rendered, workloads))
    return Decision(owner, judgement, tuple(objects.values()), unwanted, pinned)


def refuse(decision: Decision, violation: Violation) -> Decision:
    """The decision, had `violation` been known."""
    return Decision(decision.owner, replace(decision.judgement, refused=(violation,), objects=()))


def is_ours(owner: Owner, live: Object) -> bool:
    """Whether `owner` controls the object."""
    return bool(_controller(live).get("uid") == owner.uid)


def _is_unwanted(child: Child, rendered: Mapping[Child, Manifest], workloads: set[str]) -> bool:
    """Whether the spec has ceased to want it: by itself, or with its workload, of which a claim keeps its data."""
    if child.workload in workloads:
        return child.kind in DISPENSABLE and child not in rendered
    return child.kind != "PersistentVolumeClaim"


def _conflict(owner: Owner, live: Object) -> Conflict | None:
    if is_ours(owner, live):
        return None
    what = f"{live['kind']} {live['metadata']['name']}"
    controller = _controller(live)
    if (controller.get("kind"), controller.get("name")) == (KIND, owner.name):
        return Conflict(f"{what} belongs to an earlier endpoint of this name; it is being deleted", lasting=False)
    whose = f"belongs to {controller['kind']} {controller['name']}" if controller else "was made by someone else"
    return Conflict(f"{what} {whose} and is left alone; delete it, or give the endpoint another name")


def _controller(live: Object) -> Object:
    references = live["metadata"].get("ownerReferences", ())
    return next((each for each in references if each.get("controller")), {})
