"""The status of an endpoint's scaling: ``status.scaling`` and the condition Scaling. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stoker_engine.contract.termination_message import Reason as TerminationReason
from stoker_operator.api.v1alpha1.status import MAX_START_FAILURE
from stoker_operator.objects.facts import Endpoint, Object, Rollout
from stoker_operator.reconcile.diagnosis import Diagnosis
from stoker_operator.scaling.autoscaler import Phase, Recommendation

#: Field manager with which a HorizontalPodAutoscaler writes the scale subresource.
_HPA: Final = "kube-controller-manager"
#: Maximum length of a field manager's name in a message, in characters.
_MAX_MANAGER: Final = 100
#: Reasons that count as a failed start although waiting might help, because clients should not wait for an image or a
#: quota. Unschedulable pods are no failure, because a cluster autoscaler may add nodes.
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
_WAITING: Final = "The number of replicas is unchanged until the gateway reports requests."


@dataclass(frozen=True)
class ObservedScaling:
    """The scaling of an endpoint with ``spec.scaling``.

    Attributes:
        replicas: desired number of replicas.
        recommended: the autoscaler's recommendation, or None while there is none.
        start_failure: why no replica starts; empty if no failure is known.
        trouble: why replicas are not ready, or None if no replica is desired or no problem is known.
        other: another field manager that wrote ``spec.replicas``, with the time; empty if none is known.
        was_ready: whether the last status reported the newest spec as ready, with or without replicas.
        was_asleep: whether `was_ready` holds with the reason ScaledToZero or Waking.
        before: the last reported ``status.scaling``.
    """

    replicas: int
    recommended: Recommendation | None
    start_failure: str
    trouble: Diagnosis | None
    other: str
    was_ready: bool
    was_asleep: bool
    before: Mapping[str, Any]

    @property
    def phase(self) -> Phase:
        """Phase to report."""
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
    """Return the scaling of an endpoint.

    Args:
        endpoint: the endpoint, with its last status.
        recommended: the autoscaler's recommendation, or None while there is none.
        replicas: desired number of replicas.
        rollout: progress of the workload, or None while it does not exist.
        trouble: why pods are not ready, or None if no problem is known.
    """
    before = endpoint.status.get("scaling") or {}
    conditions = {each["type"]: each for each in endpoint.status.get("conditions", ())}
    ready = conditions.get("Ready", {})
    was_ready = ready.get("status") == "True" and ready.get("observedGeneration") == endpoint.generation
    is_failure = trouble is not None and (trouble.lasting or trouble.reason in _FAILURES)
    fails = (rollout is None or rollout.available == 0) and is_failure
    return ObservedScaling(
        replicas=replicas,
        recommended=recommended,
        start_failure=trouble.message[:MAX_START_FAILURE] if fails and trouble else "",
        trouble=trouble if rollout is not None and rollout.desired else None,
        other=_other(endpoint.document),
        was_ready=was_ready,
        was_asleep=was_ready and ready.get("reason") in ("ScaledToZero", "Waking"),
        before=before,
    )


def scaling_status(scaling: ObservedScaling) -> dict[str, Any]:
    """Return ``status.scaling``."""
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
    """Return status, reason and message of the condition Scaling."""
    status, reason, message = "Unknown", "MissingSignals", _WAITING
    if scaling.recommended is not None:
        status, reason, message = scaling.recommended.status, scaling.recommended.reason, scaling.recommended.message
    if scaling.trouble is not None and scaling.trouble.message not in message:
        message = f"{message} {scaling.trouble.reason}: {scaling.trouble.message}."
    if scaling.other:
        message = f"{message} {scaling.other} has written spec.replicas, which has no effect with spec.scaling."
    return status, reason, message


def _other(document: Object) -> str:
    """Return a field manager that wrote the scale subresource, with the time; empty if there is none.

    kubectl is ignored, because people use it and autoscalers do not.
    """
    for entry in document["metadata"].get("managedFields", ()):
        manager = str(entry.get("manager", ""))
        if entry.get("subresource") == "scale" and not manager.startswith("kubectl"):
            writer = f"{_HPA} (a HorizontalPodAutoscaler)" if manager == _HPA else manager[:_MAX_MANAGER]
            return f"{writer}, at {entry.get('time', 'an unknown time')},"
    return ""
