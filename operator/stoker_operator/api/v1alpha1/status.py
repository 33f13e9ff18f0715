"""The status that the operator reports."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from stoker_operator.api.v1alpha1.base import ByName, Part

Int64 = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]

#: Maximum number of engines in `copyStates`.
MAX_ENGINE_STATES: Final = 64
#: Maximum length of `scaling.startFailure` in characters.
MAX_START_FAILURE: Final = 1024


class Condition(Part):
    """One aspect of the endpoint, as in meta/v1."""

    type: Annotated[str, Field(max_length=316)]
    """Accepted: the spec is valid. Planned: the model fits on the accelerators; Unknown if the spec is not accepted, or
    if the model's shape is not known, so that only the starting engine checks it. Available: at least one pod accepts
    requests. Progressing: pods are being created or replaced. Stalled: a problem needs the user's action, or the
    operator fails to reconcile the endpoint. Routed, if there is a gateway or spec.routing requires one: the gateway
    serves the endpoint. Scaling, with spec.scaling: the number of replicas follows the load. Degraded, if pods have
    several engines: an engine does not accept requests while others in its pod do. Ready: every replica runs the newest
    spec and accepts requests; with spec.scaling, it suffices that one accepts requests, or that the endpoint is scaled
    to zero or starts from zero."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec for which the condition was evaluated."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """Time of the last change of status."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Reason for the status, as a CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Reason for the status in words, with the remedy if one is known."""


class PlanStatus(Part):
    """Division of the model among the accelerators of a replica, and the estimated capacity."""

    tensor: int
    """Number of accelerators, or of processes on accelerator cpu, over which each layer of an engine is split."""
    pipeline: int | None = None
    """Number of pipeline stages of each engine."""
    data: int
    """Number of engines of a replica."""
    expert: int | None = None
    """Number of accelerators over which experts are distributed whole; absent if they are split, or there are no
    experts."""
    nodes: int | None = None
    """Number of pods of each replica."""
    idle: int | None = None
    """Number of unused accelerators of a replica."""
    weight_bytes_per_gpu: Int64 | None = None
    """Estimated bytes of weights on the accelerator with most."""
    kv_tokens_per_copy: Int64 | None = None
    """Estimated capacity of each engine's KV cache in tokens."""
    kv_blocks: Int64 | None = None
    """Estimated number of blocks of each engine's KV cache."""
    max_model_len: Int64 | None = None
    """Maximum length of a sequence in tokens, prompt and output."""
    max_concurrency: Int64 | None = None
    """Estimated number of sequences of maxModelLen tokens that each engine's KV cache holds at once."""


class DPEngineStatus(Part):
    """State of one engine in a pod."""

    pod: Annotated[str, Field(max_length=253)]
    """Name of its pod."""
    number: Annotated[int, Field(ge=0)]
    """Index of the engine in its pod, from 0, as in the label `engine` of metrics."""
    serves: bool
    """Whether the engine accepts requests."""
    ranks: Annotated[int, Field(ge=0)] | None = None
    """Number of its ranks (processes)."""
    missing_ranks: Annotated[list[int], Field(max_length=64)] | None = None
    """Ranks that have not loaded their part of the model, or have ended; absent if there are none."""
    message: Annotated[str, Field(max_length=1024)] | None = None
    """Activity of an engine that does not accept requests, or the error that ended it."""
    kv_blocks: Int64 | None = None
    """Number of blocks of its KV cache."""
    kv_tokens: Int64 | None = None
    """Capacity of its KV cache in tokens."""


class EngineStatus(Part):
    """The engine's configuration, and what it reports."""

    args: Annotated[list[str], Field(max_length=256)] | None = None
    """Arguments of the engine's command line; long ones are truncated."""
    kv_blocks: Int64 | None = None
    """Number of blocks of the KV cache, as the engine reports it."""
    kv_cache_dtype: Annotated[str, Field(max_length=256)] | None = None
    """Type of the KV cache, as the engine reports it."""
    weights: Annotated[str, Field(max_length=256)] | None = None
    """Storage formats of the model's weights, as the engine reports them."""

    copies: Annotated[int, Field(ge=0)] | None = None
    """Number of engines in the pods; absent unless they report several engines or ranks."""
    serving_copies: Annotated[int, Field(ge=0)] | None = None
    """Number of engines that accept requests."""
    copy_states: Annotated[list[DPEngineStatus], Field(max_length=MAX_ENGINE_STATES)] | None = None
    """States of at most 64 engines; those that do not accept requests come first."""


class WorkloadStatus(Part):
    """State of a set of identical pods."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the workload; main for the pods that answer requests."""
    runtime: str | None = None
    """Runtime of the engine."""
    image: str
    """Container image of the engine."""
    plan: PlanStatus | None = None
    """Division of the model among the accelerators of a replica, and the estimated capacity."""
    engine: EngineStatus | None = None
    """The engine's configuration, and what it reports."""


class ScalingStatus(Part):
    """State of autoscaling."""

    phase: Literal["Active", "Draining", "Zero"]
    """Active: at least one replica is desired; the gateway sends requests to ready replicas. Draining: the endpoint is
    about to be scaled to zero, and the gateway holds new requests. Zero: no replica is desired until the gateway holds
    a request."""
    drain: Annotated[str, Field(max_length=64)] | None = None
    """Random identifier of a drain, which the gateway's replicas acknowledge before the endpoint is scaled to zero."""
    replicas: Annotated[int, Field(ge=0)]
    """Desired number of replicas."""
    start_seconds: Annotated[float, Field(ge=0)] | None = None
    """Median of recent start-up times in seconds, each from a scale-up until all replicas that it added are ready."""
    start_failure: Annotated[str, Field(max_length=MAX_START_FAILURE)] | None = None
    """Why no replica starts; the gateway's error for held requests includes it."""


class Address(Part):
    """An address of the OpenAI-compatible API."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the address. cluster: for clients in the cluster; loadBalancer, loadBalancer-2, …: the Service's external
    addresses; gateway: the gateway's."""
    url: str
    """Base URL of the OpenAI-compatible API."""


class Status(Part):
    """State that the operator reports."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec to which this status refers."""
    url: str | None = None
    """Base URL of the OpenAI-compatible API inside the cluster."""
    addresses: Annotated[list[Address], Field(max_length=16), *ByName] | None = None
    """All addresses of the OpenAI-compatible API."""
    replicas: Annotated[int, Field(ge=0)] | None = None
    """Number of replicas, of any version of the spec."""
    ready_replicas: Annotated[int, Field(ge=0)] | None = None
    """Number of ready replicas."""
    updated_replicas: Annotated[int, Field(ge=0)] | None = None
    """Number of replicas with the newest spec."""
    available_replicas: Annotated[int, Field(ge=0)] | None = None
    """Number of replicas that accept requests."""
    desired_replicas: Annotated[int, Field(ge=0)] | None = None
    """Desired number of replicas: spec.replicas, or with spec.scaling that of the autoscaler."""
    scaling: ScalingStatus | None = None
    """State of autoscaling; absent without spec.scaling."""
    selector: str | None = None
    """Label selector of the pods, for autoscalers."""
    workloads: Annotated[list[WorkloadStatus], Field(max_length=8), *ByName] | None = None
    """State of the workloads: sets of identical pods."""
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
    """Aspects of the endpoint; the field type explains them."""
