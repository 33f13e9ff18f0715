"""What the operator reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker_operator.api.v1alpha1.base import Part


class Condition(Part):
    """One aspect of the endpoint, as in meta/v1."""

    type: Annotated[str, Field(max_length=316)]
    """Accepted: the spec obeys the rules. Planned: it is decided how the model is spread. Available: at least one pod
    serves. Progressing: pods are being created or replaced. Ready: every replica serves, from the newest spec."""
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
    """How the model is spread over the accelerators of a pod."""

    tensor: int
    """Accelerators each copy of the model is split over."""
    data: int
    """Copies of the model in a pod."""


class Workload(Part):
    """A set of like pods."""

    name: Annotated[str, Field(max_length=63)]
    """main: the pods that answer requests."""
    image: str
    """Container image they are to run."""
    plan: PlanStatus
    """How the model is spread over the accelerators of a pod."""


class Status(Part):
    """What the operator reports."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The generation of the spec that this status is about."""
    url: str | None = None
    """Base URL of the OpenAI-compatible API, as reached from within the cluster."""
    replicas: Annotated[int, Field(ge=0)] | None = None
    """Pods there are, of any version of the spec."""
    ready_replicas: Annotated[int, Field(ge=0)] | None = None
    """Pods that are ready."""
    updated_replicas: Annotated[int, Field(ge=0)] | None = None
    """Pods of the newest spec."""
    available_replicas: Annotated[int, Field(ge=0)] | None = None
    """Pods that serve."""
    selector: str | None = None
    """Label selector of the pods, for autoscalers."""
    workloads: (
        Annotated[
            list[Workload],
            Field(
                max_length=8,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = None
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
    """Accepted, Planned, Available, Progressing and Ready."""
