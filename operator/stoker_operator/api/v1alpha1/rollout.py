"""Options for starting, replacing and terminating pods."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import NOT_IN_PODS, IntOrPercent, Part

ImageUpdates = Literal["OnSpecChange", "Always"]
DEFAULT_DRAIN_SECONDS: Final = 30
DEFAULT_STARTUP_TIMEOUT_SECONDS: Final = 3600


class Rollout(Part):
    """Options for starting, replacing and terminating pods."""

    max_surge: Annotated[IntOrPercent | None, NOT_IN_PODS] = None
    """Maximum number of additional replicas during a roll-out, or a percentage of replicas, rounded up. Absent: 1. They
    need their own accelerators; if the cluster has no spare ones, set maxSurge 0 and maxUnavailable 1."""
    max_unavailable: Annotated[IntOrPercent | None, NOT_IN_PODS] = None
    """Maximum number of replicas that are unavailable during a roll-out, or a percentage of replicas, rounded down.
    Absent: 0."""
    drain_seconds: Annotated[int, Field(ge=0, le=86400)] | None = None
    """Maximum number of seconds that a terminating pod has to finish its requests. Absent: 30."""
    startup_timeout_seconds: Annotated[int, Field(ge=1, le=604800)] | None = None
    """Number of seconds without progress after which a roll-out is reported as stalled. With runtime vllm a container
    that has not started by then is restarted. A pod must be able to download and load the model in this time. Absent:
    3600."""
    image_updates: Annotated[ImageUpdates | None, NOT_IN_PODS] = None
    """When pods are replaced because the catalogue has a newer image, or because a newer operator creates other pods
    for the same spec. OnSpecChange: at the next change of the spec that replaces pods; until then the status reports a
    newer image. Always: at once. Absent: OnSpecChange."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: it.surge not in (0, "0%") or it.unavailable not in (0, "0%"),
            cel="!(has(self.maxSurge) && (self.maxSurge == 0 || self.maxSurge == '0%')) || "
            "(has(self.maxUnavailable) && self.maxUnavailable != 0 && self.maxUnavailable != '0%')",
            message="maxSurge 0 and maxUnavailable 0 leave no way to replace a pod",
            remedy="set maxUnavailable to 1, or maxSurge to 1",
        ),
    )

    @property
    def surge(self) -> int | str:
        """`max_surge`, or its default."""
        return 1 if self.max_surge is None else self.max_surge

    @property
    def unavailable(self) -> int | str:
        """`max_unavailable`, or its default."""
        return 0 if self.max_unavailable is None else self.max_unavailable

    @property
    def drain(self) -> int:
        """`drain_seconds`, or its default."""
        return DEFAULT_DRAIN_SECONDS if self.drain_seconds is None else self.drain_seconds

    @property
    def startup_timeout(self) -> int:
        """`startup_timeout_seconds`, or its default."""
        return self.startup_timeout_seconds or DEFAULT_STARTUP_TIMEOUT_SECONDS

    @property
    def follows_images(self) -> bool:
        """Whether pods are replaced at once for a newer image or operator, without a change of the spec."""
        return self.image_updates == "Always"
