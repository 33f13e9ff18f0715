"""What was seen of the cluster, frozen: the input of every decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from stoker_engine.contract.engine_state import EngineState

Object = Mapping[str, Any]

#: The workload whose pods answer requests, and whose objects have the endpoint's name.
MAIN: Final = "main"
#: What Kubernetes says of a container that waits for nothing but its turn.
CREATING: Final = ("ContainerCreating", "PodInitializing")
#: The label that names the endpoint an object belongs to.
INSTANCE: Final = "app.kubernetes.io/instance"
#: The label that names the workload an object belongs to.
WORKLOAD: Final = "stoker.dev/workload"


class Key(NamedTuple):
    """Which endpoint."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def reference(self) -> dict[str, str]:
        """What a log record about the endpoint carries (``extra=``)."""
        named = {"namespace": self.namespace, "endpoint": self.name}
        return {field: name for field, name in named.items() if name}


class Child(NamedTuple):
    """Which of an endpoint's objects.

    Attributes:
        kind: its kind.
        workload: the set of like pods that it belongs to.
        component: which of several of a kind that a workload has; empty: the one with the workload's name.
    """

    kind: str
    workload: str = MAIN
    component: str = ""

    @classmethod
    def of(cls, manifest: Object) -> Child:
        """Which one an object with our labels is: its component is the end of its name."""
        metadata = manifest["metadata"]
        labels = metadata.get("labels") or {}
        workload, instance = labels.get(WORKLOAD, MAIN), labels.get(INSTANCE, "")
        start = f"{object_name(instance, workload)}-"
        is_component = bool(instance) and metadata["name"].startswith(start)
        return cls(manifest["kind"], workload, metadata["name"].removeprefix(start) if is_component else "")


def object_name(endpoint: str, workload: str, component: str = "") -> str:
    """The name of an endpoint's object."""
    name = endpoint if workload == MAIN else f"{endpoint}-{workload}"
    return f"{name}-{component}" if component else name


@dataclass(frozen=True)
class Endpoint:
    """An InferenceEndpoint as the API server has it.

    Attributes:
        key: which one.
        uid: which object of that name.
        generation: counts the changes of its spec.
        deleting: it is on its way out.
        document: all of it.
        status: what was reported of it last.
    """

    key: Key
    uid: str
    generation: int
    deleting: bool
    document: Object
    status: Object


class Halt(NamedTuple):
    """Why a workload takes up no changes until it is resumed.

    Attributes:
        reason: in one word.
        message: in a sentence, with the remedy.
    """

    reason: str
    message: str


@dataclass(frozen=True)
class PodCounts:
    """The pods of a workload whose replicas are groups of pods.

    Attributes:
        desired: pods there should be.
        total: pods there are.
        ready: pods that are ready.
    """

    desired: int
    total: int
    ready: int


@dataclass(frozen=True)
class Rollout:
    """How far a workload has got, in replicas.

    Attributes:
        current: its numbers are about its newest spec.
        desired: replicas there should be.
        total: replicas there are.
        updated: replicas of the newest spec.
        ready: replicas that are ready.
        available: replicas that serve.
        failure: why pods cannot even be created, where the cluster says so.
        overdue: no pod has come nearer to serving for as long as a start may take.
        halted: why it takes up no changes; None: it does.
        served: all replicas of its newest spec have served.
        pods: the same in pods; None: each replica is one pod.
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
        """Whether it has rolled out, and there is nothing left to create or to replace."""
        return self.current and self.served and self.total == self.updated == self.desired

    @property
    def complete(self) -> bool:
        """Whether every pod there should be serves from the newest spec, and no other is left."""
        counts = (self.total, self.updated, self.available)
        return self.current and all(count == self.desired for count in counts)


@dataclass(frozen=True)
class Container:
    """A container of a pod, as far as it explains why the pod does not serve.

    Attributes:
        name: its name.
        ready: it does what it is for, or has ended as an init container should.
        running: its process runs now.
        started: when that was started, as its node writes it; empty where it does not run.
        waiting: why it does not run, as Kubernetes puts it: reason and message.
        exit_code: of its last end; None if it never ended.
        exit_reason: Kubernetes' word for that end.
        last_words: the end of what it said before it.
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
    """One pod, as far as it explains why it does not serve.

    Attributes:
        name: its name.
        created: when, as the API server writes it.
        ready: it serves.
        version: which template it was made from; pods of one template have the same.
        takes_requests: it is one of the pods that answer the workload's requests.
        node: where it runs; empty as long as no node took it.
        address: its IP.
        requests: accelerators and other countable resources it holds, by name.
        unscheduled: why no node has it: reason and message.
        containers: those that have a status, in the order in which they start.
        failed: reason and message where the node refused the pod or gave it up, as in an eviction.
        mount_failure: what the node said of a volume it cannot mount.
        unready: why a pod whose containers all do what they should, or that served before, takes no requests: reason
            and message.
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
        """Whether containers are being created: their images are pulled, or their volumes mounted."""
        return any(each.waiting[0] in CREATING for each in self.containers)


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        name: its name.
        labels: its labels.
        allocatable: accelerators and other countable resources it has for pods, by name.
        ready: its kubelet reports in.
        unschedulable: it is cordoned.
    """

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, int]
    ready: bool = True
    unschedulable: bool = False


@dataclass(frozen=True)
class Reported:
    """What a running engine reports.

    Attributes:
        kv_blocks: blocks of its KV cache.
        kv_cache_dtype: how that is stored; empty: it does not say.
        weights: how its weights are stored; empty: it does not say.
    """

    kv_blocks: int
    kv_cache_dtype: str = ""
    weights: str = ""


class OlderObject(NamedTuple):
    """A Secret or ConfigMap of which pods run with an earlier state.

    Attributes:
        field: where the spec names it.
        kind: Secret or ConfigMap.
        name: its name.
        changed: when it got the data it has.
        pods: the names of those pods.
    """

    field: str
    kind: str
    name: str
    changed: datetime
    pods: tuple[str, ...]


class EngineStates(NamedTuple):
    """The engines of the model that a pod has.

    Attributes:
        engines: one after the other.
    """

    engines: tuple[EngineState, ...]

    @property
    def down(self) -> list[EngineState]:
        """Those that do not serve."""
        return [engine for engine in self.engines if not engine.serves]
