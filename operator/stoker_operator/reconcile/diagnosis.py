"""Why pods are not ready: a reason, and a message with the remedy if it is known. Pure.

Failures for which Stoker has no reason of its own keep Kubernetes' reason and message. There is no diagnosis while pods
start normally. `lasting` marks failures that need the user's action or outlast the start-up timeout, so that a tool
that waits for the endpoint can give up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from stoker_engine.contract.termination_message import Reason, TerminationMessage
from stoker_operator.api.v1alpha1.template import ENGINE_CONTAINER
from stoker_operator.objects.facts import CREATING, Container, Pod, Rollout

_PULL: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_START: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError")
_VOLUME: Final = re.compile(r"persistentvolumeclaim|unbound immediate|volume node affinity", re.IGNORECASE)
_PRESSURE: Final = re.compile(r"node\.kubernetes\.io/(memory|disk|pid)-pressure")
#: The pattern that the API server requires of a condition's reason.
_WORD: Final = re.compile(r"[A-Za-z](?:[A-Za-z0-9_,:]{0,1022}[A-Za-z0-9_])?")
#: Maximum length of a container's last message inside a condition, in characters.
_LAST_WORDS: Final = 600

#: Patterns in the logs of runtimes that write no `TerminationMessage`, such as vLLM: exception names and sentences
#: of huggingface_hub, transformers, PyTorch and vLLM.
_FOREIGN: Final = (
    (Reason.MODEL_ACCESS_DENIED, re.compile(r"GatedRepoError|401 Client Error|403 Client Error|gated repo")),
    (
        Reason.MODEL_NOT_FOUND,
        re.compile(
            r"RepositoryNotFoundError|RevisionNotFoundError|404 Client Error|is not a valid (model|git) identifier"
        ),
    ),
    (
        Reason.DOWNLOAD_FAILED,
        re.compile(
            r"LocalEntryNotFoundError|(Connection|Read|Connect)(Error|Timeout)\b.*hugg|"
            r"We couldn't connect to '\S+' to load"
        ),
    ),
    (Reason.OUT_OF_MEMORY, re.compile(r"OutOfMemoryError|No available memory for the cache blocks")),
)
#: A Python exception's name and message in a log, up to the next line with vLLM's prefix of a process, or to the end.
_EXCEPTION: Final = re.compile(r"^[\w.]*(?:Error|Exception): .*?(?=^\(\w+ pid=|\Z)", re.MULTILINE | re.DOTALL)
#: What an engine with accelerators reports if the container's memory ran out, and not an accelerator's.
_CONTAINER_MEMORY: Final = re.compile(r"container's memory|\bMemoryError|can't allocate memory")
_REMEDY: Final = {
    Reason.MODEL_NOT_FOUND: "check spec.model.source and revision, and tokenSecretRef if the model is private",
    Reason.MODEL_ACCESS_DENIED: "name a Secret with a hub token that may read the model in spec.model.tokenSecretRef",
    Reason.DOWNLOAD_FAILED: "check that pods reach the model hub; the download resumes where it stopped",
}


class Diagnosis(NamedTuple):
    """A problem of an endpoint.

    Attributes:
        reason: a condition's reason.
        message: what is wrong, with the remedy if it is known.
        lasting: whether the problem needs the user's action, or has outlasted the start-up timeout.
    """

    reason: str
    message: str
    lasting: bool = False


def diagnose(pods: Sequence[Pod], rollout: Rollout, capacity: str = "") -> Diagnosis | None:
    """Return the problem that keeps a workload's pods from becoming ready, or None if none is known.

    Args:
        pods: the workload's pods, newest first.
        rollout: progress of the workload.
        capacity: why no node has the accelerators for a pod; empty if one has, or if unknown.
    """
    if rollout.halted and not rollout.total == rollout.updated == rollout.desired:
        return Diagnosis(*rollout.halted, lasting=True)
    if "exceeded quota" in rollout.failure:
        return quota_exceeded(rollout.failure)
    if rollout.failure:
        return Diagnosis("StartError", f"the cluster fails to create pods: {rollout.failure}")
    newest = _of_newest_spec(pods, rollout)
    found = next(filter(None, (_diagnose(pod, pods, capacity) for pod in newest if not pod.ready)), None)
    if found is None and rollout.overdue:
        return Diagnosis(
            "StartupTimeout",
            "no pod has made progress for spec.rollout.startupTimeoutSeconds; see the log of the newest pod"
            + (f", {newest[0].name}" if newest else "")
            + ", and raise the timeout if the model takes longer to download and load",
            lasting=True,
        )
    return found._replace(lasting=True) if found and rollout.overdue else found


def _of_newest_spec(pods: Sequence[Pod], rollout: Rollout) -> Sequence[Pod]:
    """Return the pods of the newest spec. Problems of older pods are ignored: the newest spec may fix them."""
    if not pods:
        return ()
    version = pods[0].version
    # If the workload counts no updated pods, the newest pods are of an older spec. Its counts omit failed pods.
    if not rollout.updated and any(pod.version == version and not pod.failed[0] for pod in pods):
        return ()
    return [pod for pod in pods if pod.version == version]


def quota_exceeded(message: str) -> Diagnosis:
    """Return the diagnosis of an object that a ResourceQuota forbids."""
    return Diagnosis(
        "QuotaExceeded",
        f"a quota of the namespace is used up: {message}; raise it, or lower spec.hardware or spec.replicas",
    )


def _diagnose(pod: Pod, pods: Sequence[Pod], capacity: str) -> Diagnosis | None:
    if pod.failed[0] == "Evicted":
        return Diagnosis(
            "Evicted",
            f"pod {pod.name} was evicted from its node: {pod.failed[1]} Raise spec.hardware.resources.requests to the "
            "pod's usage, or give it a volume that holds the model (spec.storage.cache)",
        )
    if pod.failed[0]:
        subject = f"pod {pod.name} failed on node {pod.node}" if pod.node else f"pod {pod.name} has failed"
        return _platform_error(subject, *pod.failed)
    if pod.unscheduled[0] == "Unschedulable":
        return _unschedulable(pod, pods, capacity)
    if pod.unscheduled[0]:
        return _platform_error(f"pod {pod.name} is not scheduled", *pod.unscheduled)
    if pod.mount_failure:
        return _mount_failure(pod)
    # A running container may still become ready, so the others are examined first.
    containers = sorted((each for each in pod.containers if not each.ready), key=lambda each: each.running)
    found = next(filter(None, (_of_container(pod, each) for each in containers)), None)
    if found is None and pod.unready[0]:
        reason, message = pod.unready
        message = message or f"its node {pod.node} may have stopped reporting"
        return _platform_error(f"pod {pod.name} has started and is not ready", reason, message)
    return found


def _platform_error(subject: str, reason: str, message: str) -> Diagnosis:
    """Return a failure for which Stoker has no reason of its own, with Kubernetes' reason and message."""
    return Diagnosis(reason if _WORD.fullmatch(reason) else "PlatformError", f"{subject}: {message or reason}")


def _of_container(pod: Pod, container: Container) -> Diagnosis | None:
    """Return the problem of a container that is not ready, or None if none is known."""
    reason, message = container.waiting
    engine = container.name == ENGINE_CONTAINER
    container_text = f"pod {pod.name}" if engine else f"container {container.name} in pod {pod.name}"
    if reason in _PULL:
        field = "spec.engine.image" if engine else "its image in spec.template"
        return Diagnosis(
            "ImagePullError",
            f"the image of {container_text} cannot be pulled: {message or reason}; check {field} and that the "
            "nodes may pull it (spec.template.spec.imagePullSecrets)",
            lasting=reason in ("InvalidImageName", "ErrImageNeverPull"),
        )
    subject = f"the engine of pod {pod.name}" if engine else container_text
    if reason in _START:
        return Diagnosis(
            "StartError",
            f"{subject} cannot be started: {message or reason}; create or correct the object that the message names",
        )
    # Exit code 0 is an orderly stop, except in a crash loop or after an out-of-memory kill.
    killed = container.exit_reason == "OOMKilled"
    if container.exit_code or killed or (container.exit_code == 0 and reason == "CrashLoopBackOff"):
        return _ended(pod, container) if engine else _helper_ended(pod, container)
    if reason and reason not in CREATING:
        return _platform_error(f"{subject} does not run", reason, message)
    return None


def _helper_ended(pod: Pod, container: Container) -> Diagnosis:
    """Return the diagnosis of a container that ended and is not the engine."""
    subject = f"container {container.name} in pod {pod.name}"
    if container.exit_reason == "OOMKilled":
        return Diagnosis("OOMKilled", f"{subject} needs more memory than its limit; raise the limit in its definition")
    last_words = _end(container.last_words.strip()) or "it logged nothing"
    log = f"kubectl logs {pod.name} -c {container.name} --previous"
    return Diagnosis("CrashLoopBackOff", f"{subject} ended with code {container.exit_code}: {last_words}; see {log}")


def _unschedulable(pod: Pod, pods: Sequence[Pod], capacity: str) -> Diagnosis:
    message = pod.unscheduled[1].rstrip(". ")
    if _VOLUME.search(message):
        return Diagnosis(
            "VolumeNotBound",
            f"pod {pod.name} waits for a volume: {message}; create the claim that the spec names, or check that the "
            "claim's storage class exists and can provide the volume",
        )
    if _PRESSURE.search(message):
        return Diagnosis(
            "NodePressure",
            f"nodes are low on memory, disk or process IDs: {message}; free or add nodes for pod {pod.name}",
        )
    reason = f"{message}{f'; {capacity}' if capacity else ''}"
    if any(other.ready and other.version != pod.version for other in pods):
        return Diagnosis(
            "SurgeUnschedulable",
            f"no node has room for pod {pod.name}, which replaces one that still serves: {reason}; set "
            "spec.rollout.maxSurge to 0 and maxUnavailable to 1, so that the old pod is stopped first",
        )
    return Diagnosis(
        "Unschedulable", f"no node has room for pod {pod.name}: {reason}; free or add nodes, or lower spec.hardware"
    )


def _mount_failure(pod: Pod) -> Diagnosis:
    if _VOLUME.search(pod.mount_failure) or "AttachVolume" in pod.mount_failure:
        return Diagnosis(
            "VolumeNotBound",
            f"the node of pod {pod.name} cannot mount a volume: {pod.mount_failure}; check the claim, and whether "
            "another node has it attached",
        )
    return Diagnosis(
        "StartError",
        f"the node of pod {pod.name} cannot mount a volume: {pod.mount_failure}; create or correct the object that the "
        "message names",
    )


def _ended(pod: Pod, engine: Container) -> Diagnosis:
    words = TerminationMessage.parse(engine.last_words)
    reason = words.reason if words else _foreign(engine.last_words)
    message = words.message if words else _gist(engine.last_words)
    # A process killed for memory in its first second may be reported without the reason OOMKilled.
    killed = engine.exit_reason == "OOMKilled" or (engine.exit_code == 137 and not message)
    if killed or reason is Reason.OUT_OF_MEMORY:
        on_accelerator = bool(pod.requests) and not killed and not _CONTAINER_MEMORY.search(message)
        what, raised = "it has", "raise spec.hardware.resources.limits.memory"
        if on_accelerator:
            what, raised = "its accelerators have", "use more accelerators or larger ones (spec.hardware)"
        return Diagnosis(
            "OOMKilled",
            f"the engine of pod {pod.name} needs more memory than {what}{'' if killed else f': {_end(message)}'}; "
            f"{raised}, or lower spec.engine.maxModelLen or maxNumSeqs",
        )
    if reason in _REMEDY:
        # A message of Stoker's engine already names a remedy, which is more specific.
        remedy = "" if words else f"; {_REMEDY[reason]}"
        return Diagnosis(
            reason.value,
            f"pod {pod.name} cannot download the model of spec.model.source: {_end(message)}{remedy}",
            lasting=reason is not Reason.DOWNLOAD_FAILED,
        )
    if reason in (Reason.MODEL_UNSUPPORTED, Reason.START_ERROR):
        return Diagnosis("StartError", f"the engine of pod {pod.name} cannot start: {_end(message)}", lasting=True)
    last_words = _end(message) or "it logged nothing"
    log_hint = "" if words else f"; see its log: kubectl logs {pod.name} --previous"
    return Diagnosis(
        "CrashLoopBackOff", f"the engine of pod {pod.name} ended with code {engine.exit_code}: {last_words}{log_hint}"
    )


def _foreign(log_text: str) -> Reason | None:
    return next((reason for reason, pattern in _FOREIGN if pattern.search(log_text)), None)


def _gist(log_text: str) -> str:
    """Return the last exception in a log, without its traceback, truncated; the whole text if there is none."""
    exceptions = _EXCEPTION.findall(log_text)
    if not exceptions:
        return log_text.strip()
    # The beginning of an exception's message is the most informative part.
    gist = " ".join(exceptions[-1].split()).rstrip(".")
    return gist if len(gist) <= _LAST_WORDS else f"{gist[: _LAST_WORDS - 1]}…"


def _end(text: str) -> str:
    return text if len(text) <= _LAST_WORDS else f"…{text[-_LAST_WORDS:]}"
