"""One endpoint, made so: the whole flow on one screen.

Level-based: it looks at what is, not at what happened, so that it may be called at any time and any number of
times, after lost events and after a restart.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum

from stoker_operator import observe
from stoker_operator.apply import apply, apply_status
from stoker_operator.decide import decide, is_ours
from stoker_operator.facts import Key
from stoker_operator.kube import Kube
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.status import status


class Outcome(Enum):
    """What there is left to do for an endpoint."""

    GONE = "it no longer exists"
    SETTLED = "it is as it should be, or only its owner can change that"
    MOVING = "it is on its way: look again soon"
    REFUSED = "the API server will not take one of its objects: try again later"


def reconcile(kube: Kube, catalogue: Catalogue, key: Key, now: datetime) -> Outcome:
    """Makes the cluster as the endpoint wants it, and reports.

    Raises:
        KubeError: the API server could not be asked, or could not answer.
    """
    endpoint = observe.endpoint(kube, key)
    if endpoint is None or endpoint.deleting:  # its objects go with it, by their owner references
        return Outcome.GONE
    live = observe.children(kube, key)
    decision = decide(endpoint, live, catalogue)
    applied = apply(kube, decision.objects, live)

    deployment = applied.live.get("Deployment")
    rollout = observe.rollout(deployment) if deployment and is_ours(decision.owner, deployment) else None
    moving = rollout is not None and not rollout.complete
    pods = observe.pods(kube, key, decision.owner.selector()) if moving else ()
    apply_status(kube, endpoint, status(endpoint, decision, applied.refusal, applied.live, rollout, pods, now))
    if applied.refusal:
        return Outcome.REFUSED
    return Outcome.MOVING if moving or decision.conflict else Outcome.SETTLED
