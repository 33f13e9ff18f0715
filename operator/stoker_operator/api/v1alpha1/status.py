"""What the operator reports."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from stoker_operator.api.v1alpha1.base import ByName, Part

Int64 = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]

#: Engines that are listed.
MAX_ENGINE_STATES: Final = 64
#: Characters of `scaling.startFailure`.
MAX_START_FAILURE: Final = 1024


class Condition(Part):
    """One aspect of the endpoint, as in meta/v1."""

    type: Annotated[str, Field(max_length=316)]
    """Accepted: the spec obeys the rules. Planned: it is decided how the model is spread; Unknown where the model's
    shape is, and then the engine judges. Available: at least one pod serves. Progressing: pods are being created or
    replaced. Stalled: something is wrong that waiting cannot heal. Routed, where there is a gateway or one is asked
    for: it serves the endpoint. Scaling, with spec.scaling: the number of replicas follows requests. Degraded, where
    pods have several engines: one does not serve, and others of its pod do. Ready: every replica serves, from the
    newest spec; with spec.scaling: one serves and all run the newest spec, or there is none since no requests
    come."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The generation of the spec it was judged by."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the status last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, in one word."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, in a sentence, with the remedy where one is known."""


class PlanStatus(Part):
    """How the model is spread over the accelerators of a replica, and what is reckoned to fit."""

    tensor: int
    """Accelerators over which each layer of an engine of the model is split."""
    pipeline: int | None = None
    """Stages of each engine."""
    data: int
    """Copies of the model in a replica."""
    expert: int | None = None
    """Accelerators over which experts are dealt; absent where each expert is split as other layers are."""
    nodes: int | None = None
    """Pods of each replica."""
    idle: int | None = None
    """Accelerators of a replica that nothing runs on."""
    weight_bytes_per_gpu: Int64 | None = None
    """Bytes of weights on each accelerator."""
    kv_tokens_per_copy: Int64 | None = None
    """Tokens whose keys and values each engine of the model has room for."""
    kv_blocks: Int64 | None = None
    """Blocks of the key-value cache that the engine is expected to allocate."""
    max_model_len: Int64 | None = None
    """The longest sequence, prompt and output."""
    max_concurrency: Int64 | None = None
    """Sequences of that length that each engine has room for at a time."""


class DPEngineStatus(Part):
    """One of several engines in a pod."""

    pod: Annotated[str, Field(max_length=253)]
    """The pod that has it."""
    number: Annotated[int, Field(ge=0)]
    """Which of the pod's, from 0; the label engine of its metrics."""
    serves: bool
    """Whether it answers requests. One that does not is being loaded, or cannot be."""
    ranks: Annotated[int, Field(ge=0)] | None = None
    """Processes that share it."""
    missing_ranks: Annotated[list[int], Field(max_length=64)] | None = None
    """Those of them that have not loaded their part of the model, or have ended; absent where there are none."""
    message: Annotated[str, Field(max_length=1024)] | None = None
    """What an engine that does not serve is at, or what it died of."""
    kv_blocks: Int64 | None = None
    """Blocks of its key-value cache."""
    kv_tokens: Int64 | None = None
    """Tokens whose keys and values it has room for."""


class EngineStatus(Part):
    """How the engine was configured, and what it found."""

    args: Annotated[list[str], Field(max_length=256)] | None = None
    """Words of the engine's command line."""
    kv_blocks: Int64 | None = None
    """Blocks of the key-value cache that the engine allocated, as it reports them."""
    kv_cache_dtype: Annotated[str, Field(max_length=256)] | None = None
    """How the engine stores keys and values, as it reports it."""
    weights: Annotated[str, Field(max_length=256)] | None = None
    """How the engine stores the model's weights, as it reports it."""

    copies: Annotated[int, Field(ge=0)] | None = None
    """Copies of the model in the pods; absent where each has one, of one process."""
    serving_copies: Annotated[int, Field(ge=0)] | None = None
    """Those of them that answer requests."""
    copy_states: Annotated[list[DPEngineStatus], Field(max_length=MAX_ENGINE_STATES)] | None = None
    """The copies, those that do not serve first; not all of them where they are many."""


class WorkloadStatus(Part):
    """A set of like pods."""

    name: Annotated[str, Field(max_length=63)]
    """main: the pods that answer requests."""
    runtime: str | None = None
    """Which engine runs."""
    image: str
    """Container image they run."""
    plan: PlanStatus | None = None
    """How the model is spread over the accelerators of a replica, and what is reckoned to fit."""
    engine: EngineStatus | None = None
    """How the engine was configured, and what it found."""


class ScalingStatus(Part):
    """How the endpoint is scaled."""

    phase: Literal["Active", "Draining", "Zero"]
    """Active: the gateway sends requests. Draining: the endpoint is about to go to zero, and the gateway sends none and
    holds new ones. Zero: there are no replicas, and the gateway holds requests until one serves."""
    drain: Annotated[str, Field(max_length=64)] | None = None
    """The announcement that the gateway's replicas acknowledge before the endpoint goes to zero: a random word."""
    replicas: Annotated[int, Field(ge=0)]
    """Replicas there should be."""
    start_seconds: Annotated[float, Field(ge=0)] | None = None
    """How long a replica takes from its creation until it serves, as was measured."""
    start_failure: Annotated[str, Field(max_length=MAX_START_FAILURE)] | None = None
    """Why no replica starts; the gateway answers held requests with it."""


class Address(Part):
    """A way to reach the API."""

    name: Annotated[str, Field(max_length=63)]
    """Who it is for. cluster: clients in the cluster; loadBalancer: those who reach the Service's own address;
    gateway: those who reach the gateway, which serves all models."""
    url: str
    """Base URL of the OpenAI-compatible API."""


class Status(Part):
    """What the operator reports."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The generation of the spec that this status is about."""
    url: str | None = None
    """Base URL of the OpenAI-compatible API, as reached from within the cluster."""
    addresses: Annotated[list[Address], Field(max_length=16), *ByName] | None = None
    """Every way to reach the API."""
    replicas: Annotated[int, Field(ge=0)] | None = None
    """Pods there are, of any version of the spec."""
    ready_replicas: Annotated[int, Field(ge=0)] | None = None
    """Pods that are ready."""
    updated_replicas: Annotated[int, Field(ge=0)] | None = None
    """Pods of the newest spec."""
    available_replicas: Annotated[int, Field(ge=0)] | None = None
    """Pods that serve."""
    desired_replicas: Annotated[int, Field(ge=0)] | None = None
    """Replicas there should be: spec.replicas, or with spec.scaling as many as requests need."""
    scaling: ScalingStatus | None = None
    """How the endpoint is scaled, where spec.scaling says that it is."""
    selector: str | None = None
    """Label selector of the pods, for autoscalers."""
    workloads: Annotated[list[WorkloadStatus], Field(max_length=8), *ByName] | None = None
    """What runs, by kind of pod."""
    conditions: (
        Annotated[
            list[Condition],
            Field(
                max_length=16,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
            ),
        ]
        | None
    ) = None
    """Accepted, Planned, Available, Progressing, Stalled and Ready; Routed where there is a gateway, or one is asked
    for; Scaling with spec.scaling; Degraded where pods have several copies."""
