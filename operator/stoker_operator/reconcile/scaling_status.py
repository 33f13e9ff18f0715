"""What an endpoint's status says of its scaling: ``status.scaling`` and the condition Scaling. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_engine.contract.termination_message import Reason as TerminationReason
from stoker_operator.api.v1alpha1.status import MAX_START_FAILURE
from stoker_operator.objects.facts import Endpoint, Object, Rollout
from stoker_operator.reconcile.diagnosis import Diagnosis
from stoker_operator.scaling.autoscaler import Phase, Recommendation

#: What HorizontalPodAutoscaler writes the scale subresource as.
_HPA: Final = "kube-controller-manager"
#: Why a start counts as failed though waiting might help: clients should not wait until an image or a quota is there.
#: Pods that wait for room on nodes are no failure: an autoscaler of nodes may add some.
_FAILURES: Final = frozenset(
    {
        "ImagePullError",
        "QuotaExceeded",
        "CrashLoopBackOff",
        "OOMKilled",
        "StartError",
        *(str(reason) for reason in TerminationReason if reason is not TerminationReason.DOWNLOAD_FAILED),
    }
)
_WAITING: Final = "the number of replicas stays as it is until the gateway has reported requests"


@dataclass(frozen=True)
class ObservedScaling:
    """How an endpoint with ``spec.scaling`` is scaled.

    Attributes:
        replicas: how many there should be.
        recommended: what the autoscaler recommends; None: nothing yet.
        start_failure: why no replica starts; empty: they start, as far as is known.
        other: what else scales the endpoint; empty: nothing does.
        was_ready: the endpoint was ready, be it without replicas, when it was last reported.
        before: ``status.scaling`` as it was last reported.
    """

    replicas: int
    recommended: Recommendation | None
    start_failure: str
    other: str
    was_ready: bool
    before: Mapping[str, Any]

    @property
    def phase(self) -> Phase:
        """The phase to report."""
        if self.recommended is not None:
            return self.recommended.phase
        return Phase.ZERO if self.before.get("phase") == Phase.ZERO and self.replicas == 0 else Phase.ACTIVE


def observe_scaling(
    endpoint: Endpoint,
    recommended: Recommendation | None,
    replicas: int,
    rollout: Rollout | None,
    trouble: Diagnosis | None,
) -> ObservedScaling:
    """How an endpoint is scaled.

    Args:
        recommended: by the autoscaler; None: nothing yet.
        replicas: how many there should be.
        rollout: how far its pods have got; None: nothing runs them yet.
        trouble: why they do not serve.
    """
    before = endpoint.status.get("scaling") or {}
    conditions = {each["type"]: each for each in endpoint.status.get("conditions", ())}
    ready = conditions.get("Ready", {})
    is_failure = trouble is not None and (trouble.lasting or trouble.reason in _FAILURES)
    fails = rollout is not None and rollout.available == 0 and is_failure
    return ObservedScaling(
        replicas=replicas,
        recommended=recommended,
        start_failure=trouble.message[:MAX_START_FAILURE] if fails and trouble else "",
        other=_other(endpoint.document),
        was_ready=ready.get("status") == "True" and ready.get("observedGeneration") == endpoint.generation,
        before=before,
    )


def scaling_status(scaling: ObservedScaling) -> dict[str, Any]:
    """``status.scaling``."""
    recommended = scaling.recommended
    drain = recommended.drain if recommended is not None else scaling.before.get("drain", "")
    start_seconds = recommended.start_seconds if recommended is not None else scaling.before.get("startSeconds")
    reported: dict[str, Any] = {"phase": str(scaling.phase), "replicas": scaling.replicas}
    if drain and scaling.phase is not Phase.ACTIVE:
        reported["drain"] = drain
    if start_seconds is not None:
        reported["startSeconds"] = round(start_seconds, 1)
    if scaling.start_failure:
        reported["startFailure"] = scaling.start_failure
    return reported


def scaling_condition(scaling: ObservedScaling) -> tuple[str, str, str]:
    """Status, reason and message of the condition Scaling."""
    if scaling.other:
        message = (
            f"{scaling.other} writes spec.replicas, which has no effect with spec.scaling; delete the "
            "HorizontalPodAutoscaler, or remove spec.scaling"
        )
        return "False", "ForeignAutoscaler", message
    if scaling.recommended is None:
        return "Unknown", "MissingSignals", _WAITING
    return scaling.recommended.status, scaling.recommended.reason, scaling.recommended.message


def _other(document: Object) -> str:
    """The field manager of another autoscaler that writes the scale subresource; empty: there is none."""
    for entry in document["metadata"].get("managedFields", ()):
        if entry.get("subresource") == "scale" and entry.get("manager") == _HPA:
            return _HPA
    return ""
