"""Autoscaling of replicas by the load that the gateway reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part
from stoker_operator.api.v1alpha1.parallelism import CEL_MOST_ENGINES, most_engines

if TYPE_CHECKING:
    from stoker_operator.api.v1alpha1.spec import Spec

Metric = Literal["pendingRequests", "runningRequests", "kvCacheUsage"]
DEFAULT_METRIC: Final[Metric] = "pendingRequests"
DEFAULT_IDLE_SECONDS: Final = 300
DEFAULT_HOLD_SECONDS: Final = 300
#: Maximum number of replicas, as for `spec.replicas`.
MAX_REPLICAS: Final = 10000
_LEAST_TARGET: Final = 0.01
#: Limits of HorizontalPodAutoscaler's validation.
_MAX_PERIOD_SECONDS: Final = 1800
_MAX_WINDOW_SECONDS: Final = 3600
#: A day, and an hour: the client of a request that is held longer has usually given up.
_MAX_IDLE_SECONDS: Final = 86400
_MAX_HOLD_SECONDS: Final = 3600


class ScalingPolicy(Part):
    """Limit on the change of the number of replicas within a period."""

    type: Literal["Pods", "Percent"]
    """Pods: value is a number of replicas. Percent: value is a percentage of the replicas at the period's start."""
    value: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Maximum amount to add or remove."""
    period_seconds: Annotated[int, Field(ge=1, le=_MAX_PERIOD_SECONDS)]
    """Length of the period in seconds."""


class ScalingRules(Part):
    """Rules for changes of the number of replicas in one direction."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=_MAX_WINDOW_SECONDS)] | None = None
    """Length in seconds of the window whose recommendations are considered: scaleUp follows the smallest, scaleDown the
    largest. Absent: 0 for scaleUp, 300 for scaleDown."""
    select_policy: Literal["Max", "Min", "Disabled"] | None = None
    """The policy that applies. Max: the one that permits the largest change. Min: the one that permits the smallest.
    Disabled: no changes in this direction. Absent: Max."""
    policies: Annotated[list[ScalingPolicy], Field(min_length=1, max_length=16)] | None = None
    """Limits on the change within a period. Absent: for scaleUp 4 replicas or 100 percent in 15 seconds, for scaleDown
    100 percent in 15 seconds."""
    tolerance: Annotated[float, Field(ge=0, le=1)] | None = None
    """Relative deviation of the load per replica from target up to which the number of replicas stays. Absent: 0.1."""


class ScalingBehavior(Part):
    """Limits on the speed of scaling, with the fields of HorizontalPodAutoscaler's behavior."""

    scale_up: ScalingRules | None = None
    """Rules for scaling up."""
    scale_down: ScalingRules | None = None
    """Rules for scaling down. Scaling to zero follows idleSecondsToZero instead."""


class Scaling(Part):
    """Autoscaling by the load that the gateway reports."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = None
    """Minimum number of replicas. With 0, an endpoint without requests has no replica, and the gateway holds new
    requests until one is ready; if no gateway serves the endpoint, at least one replica is kept.
    Absent: 1."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """Maximum number of replicas."""
    metric: Metric | None = None
    """Metric that is compared with target. pendingRequests: requests that wait in the gateway, or that engines have not
    finished. runningRequests: requests in the engines' batches. kvCacheUsage: the fraction of the KV cache in use.
    Absent: pendingRequests."""
    target: Annotated[float, Field(le=1_000_000)]
    """Average of metric per replica to aim at: a number of requests; for kvCacheUsage a fraction below 1."""
    behavior: ScalingBehavior | None = None
    """Limits on the speed of scaling, with the fields of HorizontalPodAutoscaler's behavior."""
    idle_seconds_to_zero: Annotated[int, Field(ge=1, le=_MAX_IDLE_SECONDS)] | None = None
    """Number of seconds without requests after which an endpoint with minReplicas 0 is scaled to zero. Absent: 300."""
    hold_seconds: Annotated[int, Field(ge=1, le=_MAX_HOLD_SECONDS)] | None = None
    """Maximum number of seconds for which the gateway holds a request while no replica is ready. Absent: 300."""

    RULES: ClassVar = (
        # This is a rule and not a bound of the schema: the API server truncates the bound when it compares integers.
        Rule(
            field="target",
            holds=lambda it: it.target >= _LEAST_TARGET,
            cel=f"self.target >= {_LEAST_TARGET}",
            message="the target is too small: it is the average of metric per replica",
            remedy=f"use {_LEAST_TARGET} or more",
        ),
        Rule(
            field="minReplicas",
            holds=lambda it: it.min_replicas is None or it.min_replicas <= it.max_replicas,
            cel="!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
            message="minReplicas is above maxReplicas",
            remedy="lower minReplicas, or raise maxReplicas",
        ),
        Rule(
            field="target",
            holds=lambda it: it.metric != "kvCacheUsage" or it.target < 1,
            cel="!has(self.metric) || self.metric != 'kvCacheUsage' || self.target < 1.0",
            message="the KV cache's usage is a fraction and never exceeds 1, so no replica would ever be added",
            remedy="use a fraction below 1, such as 0.7",
        ),
        Rule(
            field="idleSecondsToZero",
            holds=lambda it: it.idle_seconds_to_zero is None or it.min_replicas == 0,
            cel="!has(self.idleSecondsToZero) || (has(self.minReplicas) && self.minReplicas == 0)",
            message="an endpoint with minReplicas above 0 is never scaled to zero",
            remedy="set minReplicas to 0, or remove idleSecondsToZero",
        ),
    )

    @property
    def fewest(self) -> int:
        """`min_replicas`, or its default."""
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def measured(self) -> Metric:
        """`metric`, or its default."""
        return self.metric or DEFAULT_METRIC

    @property
    def idle_seconds(self) -> int:
        """`idle_seconds_to_zero`, or its default."""
        return self.idle_seconds_to_zero or DEFAULT_IDLE_SECONDS

    @property
    def hold(self) -> int:
        """`hold_seconds`, or its default."""
        return self.hold_seconds or DEFAULT_HOLD_SECONDS

    def clamp(self, replicas: int) -> int:
        """Return `replicas` limited to the range from `fewest` to `max_replicas`."""
        return max(self.fewest, min(replicas, self.max_replicas))


def _target_can_be_passed(spec: Spec) -> bool:
    """Return whether a replica's metric can exceed the target. False only if the metric is ``runningRequests`` and
    ``maxNumSeqs`` limits it to the target or less."""
    scaling, limit = spec.scaling, spec.engine.max_num_seqs
    if scaling is None or scaling.measured != "runningRequests" or limit is None:
        return True
    return scaling.target < limit * most_engines(spec)


#: Rule on the target; it also depends on other parts of the spec.
TARGET_RULE: Final = Rule(
    field="scaling.target",
    holds=_target_can_be_passed,
    cel="!has(self.scaling) || !has(self.scaling.metric) || self.scaling.metric != 'runningRequests' || "
    "!has(self.engine) || !has(self.engine.maxNumSeqs) || "
    f"self.scaling.target < double(self.engine.maxNumSeqs * {CEL_MOST_ENGINES})",
    message="a replica never runs more requests than engine.maxNumSeqs for each of its engines, so no replica would "
    "ever be added",
    remedy="lower target, or raise engine.maxNumSeqs",
)
