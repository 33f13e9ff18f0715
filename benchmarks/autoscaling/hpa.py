"""A model of Kubernetes' HPA controller, for an external metric with an AverageValue target.

Written from the controller's published algorithm, with lists of time stamps, and independently of
`stoker_operator.scaling.behavior`. External metrics have no pods, so the rule for pods that are not ready does not
apply to them: the metric's sum is divided by the target.
"""

from __future__ import annotations

import math
from typing import Any, Final

PERIOD_SECONDS: Final = 15.0
DEFAULT: Final[dict[str, Any]] = {
    "scaleUp": {
        "stabilizationWindowSeconds": 0,
        "selectPolicy": "Max",
        "tolerance": 0.1,
        "policies": [
            {"type": "Pods", "value": 4, "periodSeconds": 15},
            {"type": "Percent", "value": 100, "periodSeconds": 15},
        ],
    },
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "selectPolicy": "Max",
        "tolerance": 0.1,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
    },
}


class HorizontalPodAutoscaler:
    """One HPA. `behavior` is as in a manifest, with all fields."""

    def __init__(self, lowest: int, highest: int, target: float, behavior: dict[str, Any] = DEFAULT) -> None:
        self.lowest, self.highest, self.target, self.behavior = lowest, highest, target, behavior
        self.recommendations: list[tuple[float, int]] = []
        self.events: dict[str, list[tuple[float, int]]] = {"scaleUp": [], "scaleDown": []}

    def reconcile(self, current: int, metric: float, now: float) -> int:
        """The new count, by the sum of the metric."""
        if current == 0:
            return 0
        if not self.recommendations:
            self.recommendations.append((now, current))  # a controller that starts keeps the count for one window
        if current > self.highest:
            new = self.highest
        elif current < self.lowest:
            new = self.lowest
        else:
            new = self.normalize(current, self.proposal(current, metric), now)
        if new != current:
            self.events["scaleUp" if new > current else "scaleDown"].append((now, abs(new - current)))
        return new

    def proposal(self, current: int, metric: float) -> int:
        """The count that the metric alone proposes."""
        ratio = metric / (self.target * current)
        tolerance = self.behavior["scaleUp" if ratio > 1 else "scaleDown"]["tolerance"]
        return current if abs(ratio - 1) <= tolerance else math.ceil(metric / self.target)

    def normalize(self, current: int, proposed: int, now: float) -> int:
        """Stabilize, then limit by policies and bounds."""
        direction = "scaleUp" if proposed >= current else "scaleDown"
        cutoff = now - self.behavior[direction]["stabilizationWindowSeconds"]
        recent = [count for time, count in self.recommendations if time > cutoff]
        stabilized = (min if direction == "scaleUp" else max)([proposed, *recent])
        self.recommendations.append((now, proposed))
        if stabilized > current:
            return min(stabilized, self.highest, max(current, self.limit("scaleUp", current, now)))
        if stabilized < current:
            return max(stabilized, self.lowest, min(current, self.limit("scaleDown", current, now)))
        return stabilized

    def limit(self, direction: str, current: int, now: float) -> int:
        """How far the policies permit to go."""
        rules = self.behavior[direction]
        if rules["selectPolicy"] == "Disabled":
            return current
        is_up = direction == "scaleUp"
        limits = []
        for policy in rules["policies"]:
            since = now - policy["periodSeconds"]
            start = current
            start -= sum(count for time, count in self.events["scaleUp"] if time > since)
            start += sum(count for time, count in self.events["scaleDown"] if time > since)
            sign = 1 if is_up else -1
            if policy["type"] == "Pods":
                limits.append(start + sign * policy["value"])
            else:
                share = start * (1 + sign * policy["value"] / 100)
                limits.append(math.ceil(share) if is_up else int(share))
        farthest = (rules["selectPolicy"] == "Max") == is_up
        farthest = (rules["selectPolicy"] == "Max") == is_up
        limit: int = max(limits) if farthest else min(limits)
        return limit
