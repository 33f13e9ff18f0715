"""Why pods do not serve: one word and a sentence with the remedy. Pure.

The words are those people search for, and each is said only where it is certain; what has none here is passed on in the
platform's own words. Where all there is to do is wait, nothing is said. `lasting` marks what no waiting fixes: a tool
that waits for the endpoint may give up.
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
#: What the reason of a condition may be.
_WORD: Final = re.compile(r"[A-Za-z](?:[A-Za-z0-9_,:]{0,1022}[A-Za-z0-9_])?")
#: How much of the engine's last words fits into a condition that people read in a terminal.
_LAST_WORDS: Final = 600

#: What engines that write no last words of our kind say of a hub that does not let them have a model: huggingface_hub's
#: names, and the sentences that transformers says instead.
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
#: The exception that a Python program ended with, between its traceback and what other processes still logged.
_EXCEPTION: Final = re.compile(r"^[\w.]*(?:Error|Exception): .*?(?=^\(\w+ pid=|\Z)", re.MULTILINE | re.DOTALL)
_REMEDY: Final = {
    Reason.MODEL_NOT_FOUND: "check spec.model.source and revision, and tokenSecretRef if the model is private",
    Reason.MODEL_ACCESS_DENIED: "name a Secret with a hub token that may read the model in spec.model.tokenSecretRef",
    Reason.DOWNLOAD_FAILED: "check that pods reach the model hub; the download goes on where it ended",
}


class Diagnosis(NamedTuple):
    """What is wrong.

    Attributes:
        reason: the word.
        message: the sentence, with the remedy.
        lasting: waiting does not fix it.
    """

    reason: str
    message: str
    lasting: bool = False


def diagnose(pods: Sequence[Pod], rollout: Rollout, capacity: str = "") -> Diagnosis | None:
    """What keeps an endpoint from serving; None where all there is to do is wait.

    Args:
        pods: its pods, the newest first.
        rollout: how far its workload has got.
        capacity: what the cluster's nodes have of the accelerators that a pod needs.
    """
    if rollout.halted and not rollout.total == rollout.updated == rollout.desired:
        return Diagnosis(*rollout.halted, lasting=True)
    if "exceeded quota" in rollout.failure:
        return quota_exceeded(rollout.failure)
    if rollout.failure:
        return Diagnosis("StartError", f"the cluster refuses to create pods: {rollout.failure}")
    newest = _of_newest_spec(pods, rollout)
    found = next(filter(None, (_diagnose(pod, pods, capacity) for pod in newest if not pod.ready)), None)
    if found is None and rollout.overdue:
        return Diagnosis(
            "StartupTimeout",
            "no pod has come nearer to serving for spec.rollout.startupTimeoutSeconds; see the log of the newest pod"
            + (f", {newest[0].name}" if newest else "")
            + ", and raise it if the model takes longer to download and load",
            lasting=True,
        )
    return found._replace(lasting=True) if found and rollout.overdue else found


def _of_newest_spec(pods: Sequence[Pod], rollout: Rollout) -> Sequence[Pod]:
    """The pods that were made of the newest spec: the others' troubles may be those that it fixes."""
    if not pods:
        return ()
    version = pods[0].version
    # What runs pods does not count those that nodes have given up.
    if not rollout.updated and any(pod.version == version and not pod.failed[0] for pod in pods):
        return ()
    return [pod for pod in pods if pod.version == version]


def quota_exceeded(message: str) -> Diagnosis:
    """What a ResourceQuota keeps from being created."""
    return Diagnosis(
        "QuotaExceeded",
        f"a quota of the namespace is used up: {message}; raise it, or ask for less in spec.hardware or spec.replicas",
    )


def _diagnose(pod: Pod, pods: Sequence[Pod], capacity: str) -> Diagnosis | None:
    if pod.failed[0] == "Evicted":
        return Diagnosis(
            "Evicted",
            f"pod {pod.name} was evicted from its node: {pod.failed[1]} Raise spec.hardware.resources.requests to what "
            "it needs, or give it a volume that holds the model (spec.storage.cache)",
        )
    if pod.failed[0]:
        subject = f"node {pod.node} does not keep pod {pod.name}" if pod.node else f"pod {pod.name} has failed"
        return _platform_error(subject, *pod.failed)
    if pod.unscheduled[0] == "Unschedulable":
        return _unschedulable(pod, pods, capacity)
    if pod.unscheduled[0]:
        return _platform_error(f"pod {pod.name} is given to no node", *pod.unscheduled)
    if pod.mount_failure:
        return _mount_failure(pod)
    # What runs again may yet come to serve.
    containers = sorted((each for each in pod.containers if not each.ready), key=lambda each: each.running)
    found = next(filter(None, (_of_container(pod, each) for each in containers)), None)
    if found is None and pod.unready[0]:
        reason, message = pod.unready
        message = message or f"its node {pod.node} may report no more"
        return _platform_error(f"pod {pod.name} has started and takes no requests", reason, message)
    return found


def _platform_error(subject: str, reason: str, message: str) -> Diagnosis:
    """What has no word here, in the platform's own."""
    return Diagnosis(reason if _WORD.fullmatch(reason) else "PlatformError", f"{subject}: {message or reason}")


def _of_container(pod: Pod, container: Container) -> Diagnosis | None:
    """What is wrong with a container that is not ready."""
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
            "StartError", f"{subject} cannot be started: {message or reason}; create or correct what it names"
        )
    # What ended orderly was stopped. Not so what keeps ending; memory kills have been seen as code 0.
    killed = container.exit_reason == "OOMKilled"
    if container.exit_code or killed or (container.exit_code == 0 and reason == "CrashLoopBackOff"):
        return _ended(pod, container) if engine else _helper_ended(pod, container)
    if reason and reason not in CREATING:
        return _platform_error(f"{subject} does not run", reason, message)
    return None


def _helper_ended(pod: Pod, container: Container) -> Diagnosis:
    """What there is to say of a container whose program is not ours to know."""
    subject = f"container {container.name} in pod {pod.name}"
    if container.exit_reason == "OOMKilled":
        return Diagnosis("OOMKilled", f"{subject} needs more memory than it has; raise its limit where it is defined")
    last_words = _end(container.last_words.strip()) or "it said nothing"
    log = f"kubectl logs {pod.name} -c {container.name} --previous"
    return Diagnosis("CrashLoopBackOff", f"{subject} ended with code {container.exit_code}: {last_words}; see {log}")


def _unschedulable(pod: Pod, pods: Sequence[Pod], capacity: str) -> Diagnosis:
    message = pod.unscheduled[1].rstrip(". ")
    if _VOLUME.search(message):
        return Diagnosis(
            "VolumeNotBound",
            f"pod {pod.name} waits for a volume: {message}; create the claim that the spec names, or check that its "
            "storage class exists and can provide it",
        )
    if _PRESSURE.search(message):
        return Diagnosis(
            "NodePressure",
            f"nodes run short of memory, disk or processes: {message}; free or add nodes for pod {pod.name}",
        )
    reason = f"{message}{f'; {capacity}' if capacity else ''}"
    if any(other.ready and other.version != pod.version for other in pods):
        return Diagnosis(
            "SurgeUnschedulable",
            f"no node takes pod {pod.name}, which is to replace one that still serves: {reason}; set "
            "spec.rollout.maxSurge to 0 and maxUnavailable to 1, so that the old pod makes room first",
        )
    return Diagnosis(
        "Unschedulable", f"no node takes pod {pod.name}: {reason}; free or add nodes, or ask for less in spec.hardware"
    )


def _mount_failure(pod: Pod) -> Diagnosis:
    if _VOLUME.search(pod.mount_failure) or "AttachVolume" in pod.mount_failure:
        return Diagnosis(
            "VolumeNotBound",
            f"the node of pod {pod.name} cannot mount a volume: {pod.mount_failure}; check the claim, and whether "
            "another node holds it",
        )
    return Diagnosis(
        "StartError",
        f"the node of pod {pod.name} cannot mount a volume: {pod.mount_failure}; create or correct what it names",
    )


def _ended(pod: Pod, engine: Container) -> Diagnosis:
    words = TerminationMessage.parse(engine.last_words)
    reason = words.reason if words else _foreign(engine.last_words)
    message = words.message if words else _gist(engine.last_words)
    # A process killed for memory in its first second may be reported without the word for it.
    killed = engine.exit_reason == "OOMKilled" or (engine.exit_code == 137 and not message)
    if killed or reason is Reason.OUT_OF_MEMORY:
        return Diagnosis(
            "OOMKilled",
            f"the engine of pod {pod.name} needs more memory than it has{'' if killed else f': {_end(message)}'}; "
            "raise spec.hardware.resources.limits.memory, or lower spec.engine.maxModelLen or maxNumSeqs",
        )
    if reason in _REMEDY:
        # Our own engine's message is more specific than the reason, and names the remedy.
        remedy = "" if words else f"; {_REMEDY[reason]}"
        return Diagnosis(
            reason.value,
            f"pod {pod.name} cannot get the model of spec.model.source: {_end(message)}{remedy}",
            lasting=reason is not Reason.DOWNLOAD_FAILED,
        )
    if reason in (Reason.MODEL_UNSUPPORTED, Reason.START_ERROR):
        return Diagnosis("StartError", f"the engine of pod {pod.name} will not start: {_end(message)}", lasting=True)
    last_words = _end(message) or "it said nothing"
    log_hint = "" if words else f"; its log may have more: kubectl logs {pod.name} --previous"
    return Diagnosis(
        "CrashLoopBackOff", f"the engine of pod {pod.name} ended with code {engine.exit_code}: {last_words}{log_hint}"
    )


def _foreign(log_text: str) -> Reason | None:
    return next((reason for reason, pattern in _FOREIGN if pattern.search(log_text)), None)


def _gist(log_text: str) -> str:
    """What the last lines of a log come to: the exception, if there is one, without its traceback."""
    exceptions = _EXCEPTION.findall(log_text)
    if not exceptions:
        return log_text.strip()
    # An exception says the most at its beginning.
    gist = " ".join(exceptions[-1].split()).rstrip(".")
    return gist if len(gist) <= _LAST_WORDS else f"{gist[: _LAST_WORDS - 1]}…"


def _end(text: str) -> str:
    return text if len(text) <= _LAST_WORDS else f"…{text[-_LAST_WORDS:]}"
