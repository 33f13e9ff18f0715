"""Facts → what should exist. Pure, and the only place where that is decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.api.violation import Violation
from stoker_operator.manifests.storage import sharing_problem
from stoker_operator.objects.facts import MAIN, Child, Endpoint, Object
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.reconcile.evaluate import Evaluation
from stoker_operator.reconcile.pinning import Pinned, is_rendered, pin
from stoker_operator.workloads.composition import ONE_DEPLOYMENT, Composition, Workload

#: Kinds of object that a workload may cease to want, beside those that run its pods; the others stay as long as the
#: workload does.
DISPENSABLE: Final = ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy")


#: How much the clocks of the API server and ours may.
_CLOCKS_DIFFER: Final = timedelta(seconds=10)


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
        evaluation: what was made of its spec.
        objects: what to apply. Empty where something is in the way: what runs already is left running then.
        unwanted: objects of the endpoint that are to go.
        pinned: what runs the pods among `objects`, by workload.
        conflict: what else has the name of one of its objects.
        held: pods of this spec are made when the model's description has been fetched, or has not come in time.
    """

    owner: Owner
    evaluation: Evaluation
    objects: tuple[Manifest, ...] = ()
    unwanted: tuple[Child, ...] = ()
    pinned: Mapping[str, Pinned] = field(default_factory=dict)
    conflict: Conflict | None = None
    held: bool = False


def decide(
    endpoint: Endpoint,
    owner: Owner,
    evaluation: Evaluation,
    live: Mapping[Child, Object],
    access_modes: Mapping[str, Sequence[str]],
    manager: str,
    composition: Composition = ONE_DEPLOYMENT,
) -> Decision:
    """Decides what should exist for `endpoint`.

    Args:
        endpoint: the endpoint.
        owner: what its objects are called and tied to.
        evaluation: what was made of its spec.
        live: the objects that have the names of its own.
        access_modes: how the claims that its spec names may be mounted, by their names; those that exist.
        manager: our field manager.
        composition: of which workloads endpoints consist.
    """
    if evaluation.violations or evaluation.parsed is None:
        return Decision(owner, evaluation, unwanted=unplannable_objects(endpoint, owner, evaluation, live, manager))
    if is_held(endpoint, evaluation, live, manager):
        return Decision(owner, evaluation, held=True)
    problems = (sharing_problem(each.spec, access_modes) for each in evaluation.workloads)
    problem = next(filter(None, problems), None)
    if problem:
        return Decision(owner, replace(evaluation, refused=(problem,), objects=()))
    rendered = {Child.of(each): each for each in evaluation.objects}
    workloads = {MAIN, *(child.workload for child in rendered)}
    named = (_conflict(owner, each, composition) for child, each in live.items() if child.workload in workloads)
    conflict = next(filter(None, named), None)
    if conflict:
        return Decision(owner, evaluation, conflict=conflict)
    pinned = {
        each.name: pin(
            [rendered[child] for child in _pods_of(each, rendered)],
            each,
            evaluation.plans[each.name].placement,
            live,
            endpoint,
            manager,
        )
        for each in evaluation.workloads
    }
    objects = rendered | {Child.of(each): each for workload in pinned.values() for each in workload.objects}
    owned = (
        child
        for child, each in live.items()
        if is_ours(owner, each) or (child.workload in workloads and _lost_owner(owner, each, composition))
    )
    unwanted = tuple(child for child in owned if _is_unwanted(child, rendered, workloads, composition))
    return Decision(owner, evaluation, tuple(objects.values()), unwanted, pinned)


def is_held(endpoint: Endpoint, evaluation: Evaluation, live: Mapping[Child, Object], manager: str) -> bool:
    """Whether pods wait for the model's description, so that they do not depend on when it comes: those that run this
    spec already do not."""
    if evaluation.awaited is None or evaluation.parsed is None:
        return False
    rendered = [Child.of(each) for each in evaluation.objects]
    run = all(
        child in live and is_rendered(live[child], endpoint, workload, manager)
        for workload in evaluation.workloads
        for child in _pods_of(workload, rendered)
    )
    return evaluation.parsed.spec.rollout.follows_images or not run


def _pods_of(workload: Workload, children: Iterable[Child]) -> list[Child]:
    """Those that run the workload's pods."""
    return [each for each in children if (each.kind, each.workload) == (workload.kind.name, workload.name)]


def refuse(decision: Decision, violation: Violation) -> Decision:
    """The decision, had `violation` been known."""
    return Decision(decision.owner, replace(decision.evaluation, refused=(violation,), objects=()))


def unplannable_objects(
    endpoint: Endpoint, owner: Owner, evaluation: Evaluation, live: Mapping[Child, Object], manager: str
) -> tuple[Child, ...]:
    """What runs pods and was made of this spec before it was known that the model cannot run so, and never served: it
    would only hold accelerators."""
    if not evaluation.unplannable:
        return ()
    return tuple(
        child
        for workload in evaluation.workloads
        if workload.name not in evaluation.plans
        for child in _pods_of(workload, live)
        if is_ours(owner, live[child])
        and is_rendered(live[child], endpoint, workload, manager)
        and not _has_served(endpoint, workload, live[child])
    )


def _has_served(endpoint: Endpoint, workload: Workload, live: Object) -> bool:
    """Whether a pod of the object serves or may ever have served, by what the cluster and we reported of it."""
    if workload.kind.has_served(live):
        return True
    reported = next((each for each in endpoint.status.get("conditions") or () if each["type"] == "Available"), None)
    if reported is None:
        return False
    made = datetime.fromisoformat(live["metadata"]["creationTimestamp"])
    # False since before there were pods; two clocks are compared.
    since = datetime.fromisoformat(reported["lastTransitionTime"])
    return bool(reported["status"] == "True" or since > made + _CLOCKS_DIFFER)


def is_ours(owner: Owner, live: Object) -> bool:
    """Whether `owner` controls the object."""
    return bool(_controller(live).get("uid") == owner.uid)


def _is_unwanted(
    child: Child, rendered: Mapping[Child, Manifest], workloads: Set[str], composition: Composition
) -> bool:
    """Whether the spec has ceased to want it: by itself, or with its workload, of which a claim keeps its data."""
    if child.workload in workloads:
        runs_pods = composition.kind(child.kind) is not None
        return (runs_pods or child.kind in DISPENSABLE) and child not in rendered
    return child.kind != "PersistentVolumeClaim"


def _conflict(owner: Owner, live: Object, composition: Composition) -> Conflict | None:
    if is_ours(owner, live) or _lost_owner(owner, live, composition):
        return None
    object_text = f"{live['kind']} {live['metadata']['name']}"
    controller = _controller(live)
    if (controller.get("kind"), controller.get("name")) == (KIND, owner.name):
        return Conflict(
            f"{object_text} belongs to an earlier endpoint of this name; it is being deleted", lasting=False
        )
    owner_text = f"belongs to {controller['kind']} {controller['name']}" if controller else "was made by someone else"
    return Conflict(f"{object_text} {owner_text} and is left alone; delete it, or give the endpoint another name")


def _lost_owner(owner: Owner, live: Object, composition: Composition) -> bool:
    """Whether the object was made for an endpoint of this name that let go of it, as a backup that is restored and
    ``kubectl delete --cascade=orphan`` have it. Applying what is wanted of it makes it the endpoint's again."""
    if _controller(live):
        return False
    metadata, child = live["metadata"], Child.of(live)
    of_child, kind = owner.of(child.workload, child.component), composition.kind(child.kind)
    if not of_child.labels().items() <= (metadata.get("labels") or {}).items():
        return False
    return metadata["name"] == of_child.object_name and (kind is None or kind.selects(of_child, live))


def _controller(live: Object) -> Object:
    references = live["metadata"].get("ownerReferences", ())
    return next((each for each in references if each.get("controller")), {})
