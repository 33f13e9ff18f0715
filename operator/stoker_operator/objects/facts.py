"""Facts about the cluster, and the identities of an endpoint's objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from stoker_engine.contract.engine_state import EngineState

Object = Mapping[str, Any]

#: Name of the workload whose pods answer requests; its objects' names omit it.
MAIN: Final = "main"
#: Kubernetes' waiting reasons of a container that is not created yet.
CREATING: Final = ("ContainerCreating", "PodInitializing")
#: Label with the name of an object's endpoint.
INSTANCE: Final = "app.kubernetes.io/instance"
#: Label with the name of an object's workload.
WORKLOAD: Final = "stoker.dev/workload"


class Key(NamedTuple):
    """Identifies an endpoint, or a namespace if `name` is empty."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def reference(self) -> dict[str, str]:
        """Fields of a log record about the endpoint or namespace (``extra=``)."""
        named = {"namespace": self.namespace, "endpoint": self.name}
        return {field: name for field, name in named.items() if name}


class Child(NamedTuple):
    """Identifies an object of an endpoint.

    Attributes:
        workload: name of its workload.
        component: last part of the object's name, by which a workload's objects of one kind differ; may be empty.
    """

    kind: str
    workload: str = MAIN
    component: str = ""

    @classmethod
    def of(cls, manifest: Object) -> Child:
        """Identify an object by its kind, labels and name."""
        metadata = manifest["metadata"]
        labels = metadata.get("labels") or {}
        workload, instance = labels.get(WORKLOAD, MAIN), labels.get(INSTANCE, "")
        start = f"{object_name(instance, workload)}-"
        is_component = bool(instance) and metadata["name"].startswith(start)
        return cls(manifest["kind"], workload, metadata["name"].removeprefix(start) if is_component else "")


def object_name(endpoint: str, workload: str, component: str = "") -> str:
    """Return the name of an endpoint's object."""
    name = endpoint if workload == MAIN else f"{endpoint}-{workload}"
    return f"{name}-{component}" if component else name


@dataclass(frozen=True)
class Endpoint:
    """An InferenceEndpoint as last read from the API server.

    Attributes:
        generation: generation of its spec.
        deleting: whether it is being deleted.
        document: the whole object.
        status: its status; empty before the first report.
    """

    key: Key
    uid: str
    generation: int
    deleting: bool
    document: Object
    status: Object


class Halt(NamedTuple):
    """Why a workload is paused: it applies no changes until it is resumed.

    Attributes:
        reason: a condition's reason.
        message: a condition's message, with the remedy.
    """

    reason: str
    message: str


@dataclass(frozen=True)
class PodCounts:
    """Numbers of pods of a workload whose replicas are groups of pods.

    Attributes:
        desired: number of desired pods.
        total: number of existing pods.
        ready: number of ready pods.
    """

    desired: int
    total: int
    ready: int


@dataclass(frozen=True)
class Rollout:
    """Progress of a workload's rollout, in replicas.

    Attributes:
        current: whether the workload's controller has observed its newest spec.
        desired: number of desired replicas.
        total: number of existing replicas.
        updated: number of replicas of the newest observed spec.
        ready: number of ready replicas.
        available: number of available replicas, as in a Deployment's status.
        failure: why the cluster cannot create pods; empty if no failure is known.
        overdue: whether the rollout has made no progress for the startup timeout.
        halted: why the workload applies no changes, or None if it applies them.
        served: whether the rollout was complete at some time.
        pods: the counts in pods; None if each replica is one pod.
    """

    current: bool
    desired: int
    total: int
    updated: int
    ready: int
    available: int
    failure: str = ""
    overdue: bool = False
    halted: Halt | None = None
    served: bool = False
    pods: PodCounts | None = None

    @property
    def placed(self) -> bool:
        """Whether the rollout has finished: no replica is left to create, replace or remove."""
        return self.current and self.served and self.total == self.updated == self.desired

    @property
    def complete(self) -> bool:
        """Whether every desired replica runs the newest spec and is available, and no other replica is left."""
        counts = (self.total, self.updated, self.available)
        return self.current and all(count == self.desired for count in counts)


@dataclass(frozen=True)
class Container:
    """State of a container.

    Attributes:
        ready: whether it is ready, or an init container that has completed.
        running: whether it runs.
        started: its start time, as the kubelet writes it; empty if it does not run.
        waiting: Kubernetes' reason and message while it waits to run; otherwise empty.
        exit_code: exit code of its last termination; None if it never terminated.
        exit_reason: Kubernetes' reason of that termination.
        last_words: its termination message, which may be the end of its log.
    """

    name: str
    ready: bool = False
    running: bool = False
    started: str = ""
    waiting: tuple[str, str] = ("", "")
    exit_code: int | None = None
    exit_reason: str = ""
    last_words: str = ""


@dataclass(frozen=True)
class Pod:
    """State of a pod.

    Attributes:
        created: creation time, as the API server writes it.
        ready: whether it is ready.
        version: version of its template, equal for all pods of one template.
        takes_requests: whether it is one of the pods that answer the workload's requests.
        node: its node; empty if it is not scheduled yet.
        address: its IP address; empty if it has none yet.
        requests: amounts of accelerators and other extended resources that it occupies, by name.
        unscheduled: reason and message why it is not scheduled.
        containers: the containers that have a status, init containers first.
        failed: reason and message if its phase is Failed (also after an eviction) or Unknown.
        mount_failure: the node's message about a volume that it cannot mount; empty if unknown.
        unready: reason and message why a pod is not ready although its containers are, or although it was ready before.
    """

    name: str
    created: str
    ready: bool
    version: str = ""
    takes_requests: bool = True
    node: str = ""
    address: str = ""
    requests: Mapping[str, int] = field(default_factory=dict)
    unscheduled: tuple[str, str] = ("", "")
    containers: tuple[Container, ...] = ()
    failed: tuple[str, str] = ("", "")
    mount_failure: str = ""
    unready: tuple[str, str] = ("", "")

    @property
    def starting(self) -> bool:
        """Whether a container waits to be created, for example for its image, a volume or an init container."""
        return any(each.waiting[0] in CREATING for each in self.containers)


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        allocatable: amounts of accelerators and other extended resources for pods, by name.
        unschedulable: whether it is cordoned.
    """

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, int]
    ready: bool = True
    unschedulable: bool = False


@dataclass(frozen=True)
class Reported:
    """Facts that a running engine reports.

    Attributes:
        kv_blocks: number of blocks of its KV cache.
        kv_cache_dtype: format of the KV cache; empty if not reported.
        weights: format of the weights; empty if not reported.
    """

    kv_blocks: int
    kv_cache_dtype: str = ""
    weights: str = ""


class OlderObject(NamedTuple):
    """A Secret or ConfigMap that changed after pods read it.

    Attributes:
        field: path of the first field of the spec that names it.
        kind: Secret or ConfigMap.
        changed: see `Version.changed`.
        pods: names of the pods that run with an earlier version.
    """

    field: str
    kind: str
    name: str
    changed: datetime
    pods: tuple[str, ...]


class EngineStates(NamedTuple):
    """The states of the engines of a pod.

    Attributes:
        engines: the reported states, by ascending number.
    """

    engines: tuple[EngineState, ...]

    @property
    def down(self) -> list[EngineState]:
        """The engines that do not accept requests."""
        return [engine for engine in self.engines if not engine.serves]
