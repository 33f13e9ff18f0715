"""How many replicas there are, by what the gateway reports of requests."""

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
#: As many as `spec.replicas` may have.
MAX_REPLICAS: Final = 10000
_LEAST_TARGET: Final = 0.01
#: What HPA's validation permits.
_MAX_PERIOD_SECONDS: Final = 1800
_MAX_WINDOW_SECONDS: Final = 3600
#: A day and an hour. A request that is held longer has lost its client.
_MAX_IDLE_SECONDS: Final = 86400
_MAX_HOLD_SECONDS: Final = 3600


class ScalingPolicy(Part):
    """How much the number of replicas may change within a period."""

    type: Literal["Pods", "Percent"]
    """Pods: value is a number of replicas. Percent: value is a share of the replicas at the period's start."""
    value: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """How much may be added, or removed."""
    period_seconds: Annotated[int, Field(ge=1, le=_MAX_PERIOD_SECONDS)]
    """The length of the period."""


class ScalingRules(Part):
    """How the number of replicas may change in one direction."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=_MAX_WINDOW_SECONDS)] | None = None
    """For how long a change must have been recommended: the smallest of the recommendations in this window counts for
    scaleUp, the largest for scaleDown. Absent: 0 for scaleUp, 300 for scaleDown."""
    select_policy: Literal["Max", "Min", "Disabled"] | None = None
    """Which policy counts. Max: the one that permits the largest change. Min: the smallest. Disabled: the number never
    changes in this direction. Absent: Max."""
    policies: Annotated[list[ScalingPolicy], Field(min_length=1, max_length=16)] | None = None
    """How much may change within which period. Absent: for scaleUp 4 replicas or 100 percent in 15 seconds, for
    scaleDown 100 percent in 15 seconds."""
    tolerance: Annotated[float, Field(ge=0, le=1)] | None = None
    """By which share the load per replica must miss target before the number changes. Absent: 0.1."""


class ScalingBehavior(Part):
    """How fast the number of replicas may change, in the fields of HorizontalPodAutoscaler's behavior."""

    scale_up: ScalingRules | None = None
    """How it may grow."""
    scale_down: ScalingRules | None = None
    """How it may shrink. What is idle goes to zero by idleSecondsToZero instead."""


class Scaling(Part):
    """How many replicas there are, by what the gateway reports of requests. spec.replicas has no effect then, and is
    never written: the number goes to the Deployment."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = None
    """The fewest replicas. 0: an endpoint without requests has none, and the gateway holds the next request until one
    serves; where no gateway serves the endpoint, one replica is kept. Absent: 1."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """The most replicas."""
    metric: Metric | None = None
    """What is compared with target. pendingRequests: requests that wait in the gateway, or were sent to an engine and
    have not ended. runningRequests: requests in the engines' batches. kvCacheUsage: the share of the KV cache in use.
    Absent: pendingRequests."""
    target: Annotated[float, Field(le=1_000_000)]
    """How much of metric each replica should have on average: a number of requests; for kvCacheUsage a share below
    1."""
    behavior: ScalingBehavior | None = None
    """How fast the number of replicas may change, in the fields of HorizontalPodAutoscaler's behavior."""
    idle_seconds_to_zero: Annotated[int, Field(ge=1, le=_MAX_IDLE_SECONDS)] | None = None
    """How long an endpoint has no requests before it goes to zero, where minReplicas is 0. Absent: 300."""
    hold_seconds: Annotated[int, Field(ge=1, le=_MAX_HOLD_SECONDS)] | None = None
    """How long the gateway holds a request while no replica serves. Absent: 300."""

    RULES: ClassVar = (
        # No bound of the schema: the API server compares whole numbers with the whole part of one.
        Rule(
            field="target",
            holds=lambda it: it.target >= _LEAST_TARGET,
            cel=f"self.target >= {_LEAST_TARGET}",
            message="the target is too small: it is how much of metric each replica should have",
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
            message="the KV cache's usage is a share and never passes 1, so no replica would ever be added",
            remedy="use a share below 1, such as 0.7",
        ),
        Rule(
            field="idleSecondsToZero",
            holds=lambda it: it.idle_seconds_to_zero is None or it.min_replicas == 0,
            cel="!has(self.idleSecondsToZero) || (has(self.minReplicas) && self.minReplicas == 0)",
            message="an endpoint with minReplicas above 0 never goes to zero",
            remedy="set minReplicas to 0, or remove idleSecondsToZero",
        ),
    )

    @property
    def fewest(self) -> int:
        """`min_replicas`, or what its absence means."""
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def measured(self) -> Metric:
        """`metric`, or what its absence means."""
        return self.metric or DEFAULT_METRIC

    @property
    def idle_seconds(self) -> int:
        """`idle_seconds_to_zero`, or what its absence means."""
        return self.idle_seconds_to_zero or DEFAULT_IDLE_SECONDS

    @property
    def hold(self) -> int:
        """`hold_seconds`, or what its absence means."""
        return self.hold_seconds or DEFAULT_HOLD_SECONDS

    def clamp(self, replicas: int) -> int:
        """The permitted number of replicas that is nearest to this one."""
        return max(self.fewest, min(replicas, self.max_replicas))


def _target_can_be_passed(spec: Spec) -> bool:
    """Whether a replica can have more running requests than the target: its engines bound them."""
    scaling, limit = spec.scaling, spec.engine.max_num_seqs
    if scaling is None or scaling.measured != "runningRequests" or limit is None:
        return True
    return scaling.target < limit * most_engines(spec)


#: The rule on the target, of a spec.
TARGET_RULE: Final = Rule(
    field="scaling.target",
    holds=_target_can_be_passed,
    cel="!has(self.scaling) || !has(self.scaling.metric) || self.scaling.metric != 'runningRequests' || "
    "!has(self.engine) || !has(self.engine.maxNumSeqs) || "
    f"self.scaling.target < double(self.engine.maxNumSeqs * {CEL_MOST_ENGINES})",
    message="a replica never runs more requests than engine.maxNumSeqs for each of its engines, so none would ever be "
    "added",
    remedy="lower target, or raise engine.maxNumSeqs",
)
