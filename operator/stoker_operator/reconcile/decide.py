"""Decides from facts which objects should exist for an endpoint. Pure."""

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

#: Kinds of object that are deleted when a workload no longer needs them, besides those that run its pods. Objects of
#: other kinds are kept as long as the workload exists.
DISPENSABLE: Final = ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy")


#: Maximum clock skew tolerated between the API server and the operator.
_CLOCKS_DIFFER: Final = timedelta(seconds=10)


class Conflict(NamedTuple):
    """An object that does not belong to the endpoint, and has the name of one of its objects.

    Attributes:
        message: the object and its owner, with the remedy if the user must act.
        lasting: whether the conflict lasts until the user acts.
    """

    message: str
    lasting: bool = True


@dataclass(frozen=True)
class Decision:
    """The objects that should exist for an endpoint.

    Attributes:
        owner: the endpoint, as the owner of objects.
        evaluation: the evaluation of its spec.
        objects: objects to apply; none if there is a problem, or if the pods are held.
        unwanted: objects of the endpoint to delete.
        pinned: the objects in `objects` that run pods, by workload.
        conflict: an object that does not belong to the endpoint, with the name of one of its objects, if any.
        held: whether the pods of this spec wait until the model's config.json is fetched, or its fetch has failed.
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
    """Decide which objects should exist for `endpoint`.

    Args:
        owner: the endpoint, as the owner of objects.
        evaluation: the evaluation of its spec.
        live: existing objects with the names of the endpoint's objects, regardless of their owner.
        access_modes: access modes of the existing claims that its spec names, by name.
        manager: the operator's field manager.
        composition: the workloads of an endpoint.
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
    """Return whether pods must wait for the model's config.json.

    Otherwise the pods' arguments would depend on when it arrives. Pods that already run this spec do not wait,
    except with ``rollout.imageUpdates: Always``, which renders them again.
    """
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
    """Return the children that run the workload's pods."""
    return [each for each in children if (each.kind, each.workload) == (workload.kind.name, workload.name)]


def refuse(decision: Decision, violation: Violation) -> Decision:
    """Return the decision for a spec that is refused because of `violation`."""
    return Decision(decision.owner, replace(decision.evaluation, refused=(violation,), objects=()))


def unplannable_objects(
    endpoint: Endpoint, owner: Owner, evaluation: Evaluation, live: Mapping[Child, Object], manager: str
) -> tuple[Child, ...]:
    """Return the objects that run pods of a spec that turned out to be unplannable, if no pod was ever ready.

    Their pods would only occupy accelerators.
    """
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
    """Return whether a pod of the object may have been ready, according to its status and the endpoint's."""
    if workload.kind.has_served(live):
        return True
    reported = next((each for each in endpoint.status.get("conditions") or () if each["type"] == "Available"), None)
    if reported is None:
        return False
    made = datetime.fromisoformat(live["metadata"]["creationTimestamp"])
    # No pod was ready if Available has been False since before the object was created. The times are of two clocks.
    since = datetime.fromisoformat(reported["lastTransitionTime"])
    return bool(reported["status"] == "True" or since > made + _CLOCKS_DIFFER)


def is_ours(owner: Owner, live: Object) -> bool:
    """Return whether `owner` controls the object."""
    return bool(_controller(live).get("uid") == owner.uid)


def _is_unwanted(
    child: Child, rendered: Mapping[Child, Manifest], workloads: Set[str], composition: Composition
) -> bool:
    """Return whether the spec no longer needs the object, or its workload.

    A PersistentVolumeClaim outlives its workload, because it holds data.
    """
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
            f"{object_text} belongs to an earlier endpoint of this name, and is being deleted", lasting=False
        )
    owner_text = f"belongs to {controller['kind']} {controller['name']}" if controller else "was not created by Stoker"
    return Conflict(f"{object_text} {owner_text} and is not changed; delete it, or give the endpoint another name")


def _lost_owner(owner: Owner, live: Object, composition: Composition) -> bool:
    """Return whether the object was created for an endpoint of this name and has lost its owner reference.

    That happens after a backup is restored, and after ``kubectl delete --cascade=orphan``. Applying the object makes
    the endpoint its owner again.
    """
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
