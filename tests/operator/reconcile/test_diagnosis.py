"""Why pods do not serve: from what Kubernetes and engines report to reason and remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stoker_engine.contract.termination_message import Reason, TerminationMessage
from stoker_operator.cluster.observe import pod as observe_pod
from stoker_operator.objects.facts import Rollout
from stoker_operator.reconcile.diagnosis import diagnose
from stoker_operator.workloads.deployment import DEPLOYMENT

ROLLING = Rollout(current=True, desired=1, total=1, updated=1, ready=0, available=0)
SERVING = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}


def pod(name: str = "demo-1", version: str = "new", gpus: int = 8, **status: Any) -> Any:
    """Return a pod with a status as written by a kubelet or scheduler."""
    metadata = {"name": name, "creationTimestamp": "2026-01-01T12:00:00Z"}
    containers = [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": str(gpus)} if gpus else {}}}]
    return observe_pod({"metadata": metadata, "spec": {"containers": containers}, "status": status}, version)


def unschedulable(message: str, **more: Any) -> Any:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(phase="Pending", conditions=[condition], **more)


def waiting(reason: str, message: str = "") -> Any:
    return pod(containerStatuses=[{"name": "engine", "state": {"waiting": {"reason": reason, "message": message}}}])


def ended(message: str = "", code: int = 1, reason: str = "Error", gpus: int = 8) -> Any:
    last = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    return pod(gpus=gpus, containerStatuses=[{"name": "engine", "state": state, "lastState": last}])


#: The last lines of vLLM 0.32 in pods that could not start, shortened.
NO_SUCH_MODEL = """  File "/opt/vllm/lib/python3.11/site-packages/transformers/utils/hub.py", line 569, in cached_files
    raise OSError(
OSError: org/nothing is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'
If this is a private repository, make sure to pass a token having permission to this repo
"""
NO_HUB = """  File "/opt/vllm/lib/python3.11/site-packages/transformers/utils/hub.py", line 620, in cached_files
    raise OSError(
OSError: We couldn't connect to 'http://hub:1' to load the files, and couldn't find them in the cached files.
Check your internet connection or see how to run the library in offline mode
"""
TOO_LONG = """    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (8192) is greater than the derived max_model_len (4096.0)
(APIServer pid=1) INFO 11-22 00:16:14 [model.py:733] Resolved architecture: LlamaForCausalLM
"""

CASES = [
    (unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), "Unschedulable", "lower spec.hardware"),
    (unschedulable('persistentvolumeclaim "weights" not found'), "VolumeNotBound", "create the claim"),
    (unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"), "VolumeNotBound", ""),
    (
        unschedulable(
            "0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/memory-pressure: }"
        ),
        "NodePressure",
        "add nodes",
    ),
    (waiting("ImagePullBackOff", 'Back-off pulling image "no/such:1"'), "ImagePullError", "spec.engine.image"),
    (waiting("ErrImageNeverPull"), "ImagePullError", "spec.engine.image"),
    (waiting("CreateContainerConfigError", 'secret "token" not found'), "StartError", 'secret "token" not found'),
    (ended(code=137, reason="OOMKilled"), "OOMKilled", "limits.memory"),
    (ended(code=137), "OOMKilled", "limits.memory"),  # containerd's report of an early death
    (ended(code=0, reason="OOMKilled"), "OOMKilled", "limits.memory"),  # containerd's occasional report
    (ended(code=0, reason="Completed"), "CrashLoopBackOff", "ended with code 0"),
    (ended(str(TerminationMessage(Reason.OUT_OF_MEMORY, "the model needs 9 GiB"))), "OOMKilled", "needs 9 GiB"),
    (ended(str(TerminationMessage(Reason.MODEL_NOT_FOUND, "there is no org/x"))), "ModelNotFound", "no org/x"),
    (ended(str(TerminationMessage(Reason.MODEL_ACCESS_DENIED, "org/x is gated"))), "ModelAccessDenied", "is gated"),
    (ended(str(TerminationMessage(Reason.DOWNLOAD_FAILED, "the disk is full"))), "DownloadFailed", "disk is full"),
    (
        ended(str(TerminationMessage(Reason.START_ERROR, "--tensor-parallel-size 2: one device"))),
        "StartError",
        "one device",
    ),
    (ended(str(TerminationMessage(Reason.ENGINE_DIED, "the engine died of SIGSEGV"))), "CrashLoopBackOff", "SIGSEGV"),
    (
        ended(str(TerminationMessage(Reason.ENGINE_DIED, "engine 1 of 2: rank 3 of 4 was killed (SIGKILL)"))),
        "CrashLoopBackOff",
        "engine 1 of 2: rank 3 of 4 was killed",
    ),
    (ended("huggingface_hub.errors.GatedRepoError: 401 Client Error."), "ModelAccessDenied", "tokenSecretRef"),
    (ended("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error."), "ModelNotFound", "model.source"),
    (ended(NO_SUCH_MODEL), "ModelNotFound", "model.source: OSError: org/nothing is not a local folder"),
    (ended(NO_HUB), "DownloadFailed", "model.source: OSError: We couldn't connect to 'http://hub:1' to load the files"),
    (ended(TOO_LONG), "CrashLoopBackOff", "code 1: pydantic_core._pydantic_core.ValidationError: 1 validation error"),
    (
        ended("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        "OOMKilled",
        "more memory than its accelerators have: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; "
        "use more accelerators or larger ones (spec.hardware), or lower spec.engine.maxModelLen",
    ),
    (
        ended(str(TerminationMessage(Reason.OUT_OF_MEMORY, "the model needs 9 GiB")), gpus=0),
        "OOMKilled",
        "more memory than it has: the model needs 9 GiB; raise spec.hardware.resources.limits.memory",
    ),
    *(
        (ended(str(TerminationMessage(Reason.OUT_OF_MEMORY, message))), "OOMKilled", "resources.limits.memory")
        for message in (
            "the kernel killed the engine because the container's memory ran out (SIGKILL)",
            "the engine died: MemoryError: ",
        )
    ),
    (ended("Segmentation fault", code=139), "CrashLoopBackOff", "code 139: Segmentation fault"),
    (ended(), "CrashLoopBackOff", "it logged nothing"),
    (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage."),
        "Evicted",
        "low on resource: ephemeral-storage",
    ),
]


@pytest.mark.parametrize(("seen", "reason", "message"), CASES, ids=[f"{case[1]}-{i}" for i, case in enumerate(CASES)])
def test_each_problem_has_its_reason_and_remedy(seen: Any, reason: str, message: str) -> None:
    found = diagnose([seen], ROLLING)
    assert found and found.reason == reason
    assert message in found.message
    assert "demo-1" in found.message


STOPPED = {"terminated": {"exitCode": 0, "reason": "Completed"}}


@pytest.mark.parametrize(
    "seen",
    [
        pod(),
        waiting("ContainerCreating"),
        waiting("PodInitializing"),
        pod(**SERVING),
        pod(containerStatuses=[{"name": "engine", "state": STOPPED}]),
    ],
    ids=range(5),
)
def test_normal_progress_has_no_diagnosis(seen: Any) -> None:
    assert diagnose([seen], ROLLING) is None


def test_surge_pod_without_room_is_diagnosed() -> None:
    old = pod("demo-0", "old", **SERVING)
    found = diagnose([unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."), old], ROLLING)
    assert found and found.reason == "SurgeUnschedulable"
    assert "maxSurge to 0 and maxUnavailable to 1" in found.message
    # Beside a pod of the same version it replaces nothing: it is an additional replica.
    same = pod("demo-0", "new", **SERVING)
    found = diagnose([unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."), same], ROLLING)
    assert found and found.reason == "Unschedulable"


def test_capacity_of_the_nodes_is_named_for_unschedulable_pods() -> None:
    found = diagnose(
        [unschedulable("Insufficient nvidia.com/gpu")], ROLLING, "no node can ever hold 8 × nvidia.com/gpu"
    )
    assert found and "no node can ever hold 8" in found.message


def test_unmountable_volumes_are_diagnosed() -> None:
    seen = dataclasses.replace(pod(), mount_failure='MountVolume.SetUp failed for volume "api-keys": secret not found')
    found = diagnose([seen], ROLLING)
    assert found and found.reason == "StartError" and "api-keys" in found.message
    seen = dataclasses.replace(pod(), mount_failure="AttachVolume.Attach failed: volume is attached to another node")
    found = diagnose([seen], ROLLING)
    assert found and found.reason == "VolumeNotBound"


def test_refused_pod_creation_is_diagnosed() -> None:
    quota = dataclasses.replace(ROLLING, failure='pods "demo-1" is forbidden: exceeded quota: team, requested: ...')
    found = diagnose([], quota)
    assert found and found.reason == "QuotaExceeded" and not found.lasting
    found = diagnose([], dataclasses.replace(ROLLING, failure='pods "demo-1" is forbidden: violates PodSecurity'))
    assert found and found.reason == "StartError" and "PodSecurity" in found.message


def test_slow_start_is_diagnosed() -> None:
    overdue = dataclasses.replace(ROLLING, overdue=True)
    found = diagnose([pod()], overdue)
    assert found and (found.reason, found.lasting) == ("StartupTimeout", True)
    # A known problem is reported instead of a slow start, and waiting is pointless.
    found = diagnose([waiting("ImagePullBackOff")], overdue)
    assert found and (found.reason, found.lasting) == ("ImagePullError", True)


def test_permanent_errors_are_lasting_and_transient_ones_are_not() -> None:
    lasting = {found.reason for seen, _, _ in CASES if (found := diagnose([seen], ROLLING)) and found.lasting}
    assert lasting == {"ModelNotFound", "ModelAccessDenied", "StartError", "ImagePullError"}
    pulling = diagnose([waiting("ImagePullBackOff")], ROLLING)
    assert pulling and not pulling.lasting  # the registry may be back soon
    missing = diagnose([waiting("CreateContainerConfigError", 'secret "token" not found')], ROLLING)
    assert missing and not missing.lasting  # it may be created any moment


def test_long_termination_messages_keep_their_end() -> None:
    found = diagnose([ended("x" * 3000 + " the end")], ROLLING)
    assert found and " the end; see its log" in found.message and len(found.message) < 800


def container(name: str, **status: Any) -> dict[str, Any]:
    return {"name": name, "ready": False, **status}


STARTING = container("engine", state={"waiting": {"reason": "PodInitializing"}})
RUNNING = container("engine", ready=True, state={"running": {"startedAt": "2026-01-01T12:00:05Z"}})
PULLS = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling no/such:1"}}
LOOPS = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
ENDED = {"terminated": {"exitCode": 3, "reason": "Error", "message": "no route to the vault"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        ({"state": PULLS}, "ImagePullError", "no/such:1"),
        ({"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no Secret x"}}}, "StartError", "x"),
        ({"state": LOOPS, "lastState": ENDED}, "CrashLoopBackOff", "no route to the vault"),
        ({"state": ENDED}, "CrashLoopBackOff", "ended with code 3"),
        ({"state": {"running": {}}, "lastState": ENDED}, "CrashLoopBackOff", "kubectl logs demo-1 -c helper"),
        ({"state": LOOPS, "lastState": KILLED}, "OOMKilled", "more memory"),
        ({"state": {"waiting": {"reason": "SomethingNew", "message": "in its words"}}}, "SomethingNew", "in its words"),
    ],
)
def test_problems_of_every_container_are_reported(kind: str, status: Any, reason: str, message: str) -> None:
    helper = container("helper", **status)
    engine = STARTING if kind == "initContainerStatuses" else RUNNING
    statuses: dict[str, Any] = {"containerStatuses": [engine]}
    statuses[kind] = [*statuses.get(kind, []), helper]
    found = diagnose([pod(phase="Pending", **statuses)], ROLLING)
    assert found and found.reason == reason
    assert message in found.message and "container helper in pod demo-1" in found.message


def test_recovered_container_is_not_blamed() -> None:
    engine = container("engine", state={"running": {"startedAt": "2026-01-01T12:00:05Z"}})
    helper = container("helper", ready=True, state={"running": {}}, lastState=ENDED)
    assert diagnose([pod(containerStatuses=[engine, helper])], ROLLING) is None
    # A restarted engine is not blamed for another container's problem.
    restarted = engine | {"lastState": ENDED}
    found = diagnose([pod(containerStatuses=[restarted, container("helper", state=PULLS)])], ROLLING)
    assert found and found.reason == "ImagePullError"


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "OutOfcpu", "NodeAffinity", "Preempted", "NeverSeen"])
def test_rejection_by_a_node_is_reported_with_its_reason(reason: str) -> None:
    found = diagnose([pod(phase="Failed", reason=reason, message="Pod was rejected: so")], ROLLING)
    assert found and found.reason == reason and "Pod was rejected: so" in found.message
    nameless = diagnose([pod(phase="Failed")], ROLLING)
    assert nameless and nameless.reason == "PodFailed"
    odd = diagnose([pod(phase="Failed", reason="not a word", message="m")], ROLLING)
    assert odd and odd.reason == "PlatformError"


def test_scheduling_and_readiness_gates_are_diagnosed() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "one gate"}
    found = diagnose([pod(phase="Pending", conditions=[gated])], ROLLING)
    assert found and found.reason == "SchedulingGated" and "one gate" in found.message
    conditions: list[dict[str, str]] = [
        {"type": "ContainersReady", "status": "True"},
        {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady", "message": "gate x"},
    ]
    shut: Any = {"conditions": conditions, "containerStatuses": [RUNNING]}
    found = diagnose([pod(**shut)], ROLLING)
    assert found and found.reason == "ReadinessGatesNotReady" and "gate x" in found.message


@pytest.mark.parametrize(("turned", "is_reported"), [("2026-01-01T12:00:00Z", False), ("2026-01-01T13:00:00Z", True)])
def test_pod_that_became_unready_is_reported(turned: str, is_reported: bool) -> None:
    ready = {
        "type": "Ready",
        "status": "False",
        "reason": "ContainersNotReady",
        "message": "containers with unready status: [engine]",
        "lastTransitionTime": turned,
    }
    found = diagnose([pod(conditions=[ready], containerStatuses=[RUNNING | {"ready": False}])], ROLLING)
    assert (found is not None) == is_reported
    if found:
        assert found.reason == "ContainersNotReady" and "containers with unready status: [engine]" in found.message


def test_problems_of_older_pods_are_not_blamed_on_the_newest_spec() -> None:
    crashed = ended("no such option")
    old = dataclasses.replace(crashed, name="demo-0", version="old", created="2026-01-01T11:00:00Z")
    fixed = Rollout(current=True, desired=1, total=1, updated=0, ready=0, available=0)
    assert diagnose([old], fixed) is None
    pods = dataclasses.replace(fixed, total=2, updated=1)
    assert diagnose([pod(), old], pods) is None
    found = diagnose([crashed, old], pods)
    assert found and "demo-1" in found.message
    # Pods refused by a node are recreated endlessly, and counted nowhere.
    refused = pod(phase="Failed", reason="OutOfcpu", message="m")
    found = diagnose([refused, old], fixed)
    assert found and found.reason == "OutOfcpu"


def test_paused_deployment_is_diagnosed() -> None:
    paused = {"metadata": {"generation": 1}, "spec": {"replicas": 1, "paused": True}}
    halted = DEPLOYMENT.rollout([paused]).halted
    held = dataclasses.replace(ROLLING, updated=0, halted=halted)
    found = diagnose([pod()], held)
    assert found and (found.reason, found.lasting) == ("DeploymentPaused", True)
    assert "kubectl rollout resume" in found.message
    # It is irrelevant if nothing is to be changed.
    assert diagnose([pod()], dataclasses.replace(ROLLING, halted=halted)) is None


def test_deployment_failures_are_reported_with_their_message() -> None:
    def seen(**condition: str) -> Rollout:
        conditions = [{"type": "Progressing", "status": "False", **condition}]
        status = {"observedGeneration": 1, "conditions": conditions}
        spec = {"replicas": 1, "paused": True}
        return DEPLOYMENT.rollout([{"metadata": {"generation": 1}, "spec": spec, "status": status}])

    rollout = seen(reason="ReplicaSetCreateError", message="the name is taken")
    assert rollout.halted and rollout.failure == "the name is taken"
    overdue = seen(reason="ProgressDeadlineExceeded", message="m")
    assert overdue.overdue and not overdue.failure
