"""Why pods do not serve: one word and a sentence with the remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stoker_operator.facts import Pod

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError")
#: How much of the engine's last words fits into a condition that people read in a terminal.
_LAST_WORDS = 600


class Diagnosis(NamedTuple):
    """What is wrong."""

    reason: str
    message: str


def diagnose(pods: Iterable[Pod]) -> Diagnosis | None:
    """What keeps the first pod that has trouble from serving; None where all there is to do is wait."""
    return next(filter(None, (_diagnose(pod) for pod in pods if not pod.ready)), None)


def _diagnose(pod: Pod) -> Diagnosis | None:
    reason, message = pod.waiting
    if pod.unschedulable:
        return Diagnosis(
            "Unschedulable",
            f"no node takes pod {pod.name}: {pod.unschedulable} Free or add nodes, or ask for less in spec.hardware",
        )
    if reason in _PULL:
        return Diagnosis(
            "ImagePullError",
            f"the image of pod {pod.name} cannot be pulled: {message or reason}; check spec.engine.image and that the "
            "nodes may pull it",
        )
    if reason in _START:
        return Diagnosis("StartError", f"the engine of pod {pod.name} cannot be started: {message or reason}")
    if pod.exit_code is None or pod.exit_code == 0:
        return None
    # A process killed for memory in its first second may be reported without the word for it.
    if pod.exit_reason == "OOMKilled" or pod.exit_code == 137:
        return Diagnosis(
            "OOMKilled",
            f"the engine of pod {pod.name} was killed for using too much memory; raise "
            "spec.hardware.resources.limits.memory, or lower spec.engine.maxModelLen",
        )
    words = pod.last_words.strip()[-_LAST_WORDS:] or "it said nothing; see the pod's log"
    return Diagnosis("CrashLoopBackOff", f"the engine of pod {pod.name} ended with code {pod.exit_code}: {words}")
