"""Facts → what should exist. Pure, and the only place where that is decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.api.violation import Violation
from stoker_operator.manifests.storage import sharing_problem
from stoker_operator.objects.facts import MAIN, WORKLOAD, Child, Endpoint, Object
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.reconcile.evaluate import Evaluation
from stoker_operator.reconcile.pinning import Pinned, is_rendered, pin

#: Kinds of object that a workload may cease to want; the others stay as long as it does.
DISPENSABLE = ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy")


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
        pinned: the Deployments among `objects`, by workload.
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
) -> Decision:
    """Decides what should exist for `endpoint`.

    Args:
        endpoint: the endpoint.
        owner: what its objects are called and tied to.
        evaluation: what was made of its spec.
        live: the objects that have the names of its own.
        access_modes: how the claims that its spec names may be mounted, by their names; those that exist.
        manager: our field manager.
    """
    if evaluation.violations or evaluation.parsed is None:
        return Decision(owner, evaluation, unwanted=unplannable_deployments(endpoint, owner, evaluation, live, manager))
    if is_held(endpoint, evaluation, live, manager):
        return Decision(owner, evaluation, held=True)
    spec = evaluation.parsed.spec
    problem = sharing_problem(spec, access_modes)
    if problem:
        return Decision(owner, replace(evaluation, refused=(problem,), objects=()))
    rendered = {Child.of(each): each for each in evaluation.objects}
    workloads = {MAIN, *(child.workload for child in rendered)}
    named = (_conflict(owner, each) for child, each in live.items() if child.workload in workloads)
    conflict = next(filter(None, named), None)
    if conflict:
        return Decision(owner, evaluation, conflict=conflict)
    pinned = {
        child.workload: pin(each, live.get(child), endpoint, spec, manager)
        for child, each in rendered.items()
        if child.kind == "Deployment"
    }
    objects = rendered | {Child("Deployment", workload): each.deployment for workload, each in pinned.items()}
    owned = (
        child
        for child, each in live.items()
        if is_ours(owner, each) or (child.workload in workloads and _lost_owner(owner, each))
    )
    unwanted = tuple(child for child in owned if _is_unwanted(child, rendered, workloads))
    return Decision(owner, evaluation, tuple(objects.values()), unwanted, pinned)


def is_held(endpoint: Endpoint, evaluation: Evaluation, live: Mapping[Child, Object], manager: str) -> bool:
    """Whether pods wait for the model's description, so that they do not depend on when it comes: those that run this
    spec already do not."""
    if evaluation.awaited is None or evaluation.parsed is None:
        return False
    spec = evaluation.parsed.spec
    pods = [child for child in map(Child.of, evaluation.objects) if child.kind == "Deployment"]
    run = all(child in live and is_rendered(live[child], endpoint, spec, manager) for child in pods)
    return spec.rollout.follows_images or not run


def refuse(decision: Decision, violation: Violation) -> Decision:
    """The decision, had `violation` been known."""
    return Decision(decision.owner, replace(decision.evaluation, refused=(violation,), objects=()))


def unplannable_deployments(
    endpoint: Endpoint, owner: Owner, evaluation: Evaluation, live: Mapping[Child, Object], manager: str
) -> tuple[Child, ...]:
    """The Deployments that were made of this spec before it was known that the model cannot run so, and never served:
    they would only hold accelerators."""
    if not evaluation.unplannable or evaluation.parsed is None:
        return ()
    spec = evaluation.parsed.spec
    return tuple(
        child
        for child, each in live.items()
        if child.kind == "Deployment"
        and is_ours(owner, each)
        and is_rendered(each, endpoint, spec, manager)
        and not _has_served(endpoint, each)
    )


def _has_served(endpoint: Endpoint, deployment: Object) -> bool:
    """Whether a pod of the Deployment serves or may ever have served, by what the cluster and we reported of it."""
    status = deployment.get("status") or {}
    if status.get("readyReplicas") or status.get("availableReplicas"):
        return True
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    if conditions.get("Progressing", {}).get("reason") == "NewReplicaSetAvailable":
        return True
    reported = next((each for each in endpoint.status.get("conditions") or () if each["type"] == "Available"), None)
    if reported is None:
        return False
    made = datetime.fromisoformat(deployment["metadata"]["creationTimestamp"])
    # False since before there were pods; two clocks are compared.
    since = datetime.fromisoformat(reported["lastTransitionTime"])
    return bool(reported["status"] == "True" or since > made + _CLOCKS_DIFFER)


def is_ours(owner: Owner, live: Object) -> bool:
    """Whether `owner` controls the object."""
    return bool(_controller(live).get("uid") == owner.uid)


def _is_unwanted(child: Child, rendered: Mapping[Child, Manifest], workloads: set[str]) -> bool:
    """Whether the spec has ceased to want it: by itself, or with its workload, of which a claim keeps its data."""
    if child.workload in workloads:
        return child.kind in DISPENSABLE and child not in rendered
    return child.kind != "PersistentVolumeClaim"


def _conflict(owner: Owner, live: Object) -> Conflict | None:
    if is_ours(owner, live) or _lost_owner(owner, live):
        return None
    object_text = f"{live['kind']} {live['metadata']['name']}"
    controller = _controller(live)
    if (controller.get("kind"), controller.get("name")) == (KIND, owner.name):
        return Conflict(
            f"{object_text} belongs to an earlier endpoint of this name; it is being deleted", lasting=False
        )
    owner_text = f"belongs to {controller['kind']} {controller['name']}" if controller else "was made by someone else"
    return Conflict(f"{object_text} {owner_text} and is left alone; delete it, or give the endpoint another name")


def _lost_owner(owner: Owner, live: Object) -> bool:
    """Whether the object was made for an endpoint of this name that let go of it, as a backup that is restored and
    ``kubectl delete --cascade=orphan`` have it. Applying what is wanted of it makes it the endpoint's again."""
    if _controller(live):
        return False
    metadata = live["metadata"]
    of_workload = owner.of((metadata.get("labels") or {}).get(WORKLOAD, MAIN))
    if not of_workload.labels().items() <= (metadata.get("labels") or {}).items():
        return False
    # A Deployment's selector can never change.
    selects = live["spec"]["selector"].get("matchLabels") if live["kind"] == "Deployment" else of_workload.selector()
    return bool(selects == of_workload.selector() and metadata["name"] == of_workload.object_name)


def _controller(live: Object) -> Object:
    references = live["metadata"].get("ownerReferences", ())
    return next((each for each in references if each.get("controller")), {})
