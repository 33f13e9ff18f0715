"""A model of Kubernetes' HPA controller, for an external metric with an AverageValue target.

It is written from the controller's published algorithm, independently of `stoker_operator.scaling.behavior`. The rule
for pods that are not ready does not apply to external metrics: the metric's sum is divided by the target. The model is
tested against a trace of the real controller, recorded by `record_hpa.py`.
"""

from __future__ import annotations

import math
from typing import Any, Final

PERIOD_SECONDS: Final = 15.0
#: Downscale stabilization window of an HPA without `behavior`, in seconds.
DEFAULT_WINDOW_SECONDS: Final = 300.0
DEFAULT_TOLERANCE: Final = 0.1
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
    """One HPA.

    Args:
        behavior: as in a manifest, with all fields; None for an HPA without it, to which other rules apply.
        window_seconds: downscale stabilization window without `behavior`.
    """

    def __init__(
        self,
        lowest: int,
        highest: int,
        target: float,
        behavior: dict[str, Any] | None = DEFAULT,
        window_seconds: float = DEFAULT_WINDOW_SECONDS,
    ) -> None:
        self.lowest, self.highest, self.target, self.behavior = lowest, highest, target, behavior
        self.window_seconds = window_seconds
        self.recommendations: list[tuple[float, int]] = []
        self.events: dict[str, list[tuple[float, int]]] = {"scaleUp": [], "scaleDown": []}

    def reconcile(self, current: int, metric: float, now: float) -> int:
        """Return the new number of replicas, given the sum of the metric."""
        if current == 0 and self.lowest > 0:
            return 0
        if not self.recommendations:
            self.recommendations.append((now, current))  # a new controller does not scale down for one window
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
        """Return the number of replicas that the metric alone proposes."""
        needed = math.ceil(metric / self.target)
        if current == 0:
            return needed
        ratio = metric / (self.target * current)
        rules = self.behavior or {"scaleUp": {}, "scaleDown": {}}
        up, down = (rules[side].get("tolerance", DEFAULT_TOLERANCE) for side in ("scaleUp", "scaleDown"))
        # Compared as the controller does: with 1.1, `abs(ratio - 1) <= 0.1` is false because of rounding.
        return current if 1 - down <= ratio <= 1 + up else needed

    def normalize(self, current: int, proposed: int, now: float) -> int:
        """Stabilize, then limit by policies and bounds."""
        if self.behavior is None:
            return self.normalize_without_behavior(current, proposed, now)
        lowest = min([proposed, *self.recent("scaleUp", now)])
        highest = max([proposed, *self.recent("scaleDown", now)])
        stabilized = min(max(current, lowest), highest)
        self.recommendations.append((now, proposed))
        if stabilized > current:
            return min(stabilized, self.highest, max(current, self.limit("scaleUp", current, now)))
        if stabilized < current:
            return max(stabilized, self.lowest, min(current, self.limit("scaleDown", current, now)))
        return stabilized

    def recent(self, direction: str, now: float) -> list[int]:
        """Return the recommendations within a direction's stabilization window."""
        assert self.behavior is not None
        cutoff = now - self.behavior[direction]["stabilizationWindowSeconds"]
        return [count for time, count in self.recommendations if time > cutoff]

    def normalize_without_behavior(self, current: int, proposed: int, now: float) -> int:
        """Stabilize, then limit each step to twice the number of replicas, or to 4."""
        recent = [count for time, count in self.recommendations if time >= now - self.window_seconds]
        self.recommendations.append((now, proposed))
        return max(self.lowest, min(max([proposed, *recent]), self.highest, max(2 * current, 4)))

    def limit(self, direction: str, current: int, now: float) -> int:
        """Return the number of replicas up or down to which the policies permit to scale."""
        assert self.behavior is not None
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
        limit: int = max(limits) if farthest else min(limits)
        return limit
