"""HorizontalPodAutoscaler's `behavior`: limits of how fast the number of replicas changes.

The rules are those of Kubernetes' HPA controller: a recommendation is stabilized over the windows of both directions,
and then limited by policies, each over its own period.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

SelectPolicy = Literal["Max", "Min", "Disabled"]


@dataclass(frozen=True)
class Policy:
    """Number or percentage of replicas that may be added or removed within `period_seconds`."""

    type: Literal["Pods", "Percent"]
    value: int
    period_seconds: float


@dataclass(frozen=True)
class Rules:
    """Limits of changes in one direction. `tolerance` is a fraction of the target."""

    stabilization_window_seconds: float
    policies: tuple[Policy, ...]
    select_policy: SelectPolicy = "Max"
    tolerance: float = 0.1


#: HPA's defaults.
SCALE_UP: Final = Rules(0.0, (Policy("Pods", 4, 15), Policy("Percent", 100, 15)))
SCALE_DOWN: Final = Rules(300.0, (Policy("Percent", 100, 15),))


@dataclass(frozen=True)
class Behavior:
    """Limits of changes in both directions."""

    scale_up: Rules = SCALE_UP
    scale_down: Rules = SCALE_DOWN

    @property
    def longest_window(self) -> float:
        """The longer one of the stabilization windows, in seconds."""
        return max(self.scale_up.stabilization_window_seconds, self.scale_down.stabilization_window_seconds)


@dataclass
class _Run:
    """Equal recommendations of consecutive updates, with the time of the last."""

    value: int
    last: float


@dataclass
class History:
    """Recent recommendations and changes.

    Attributes:
        recommendations: oldest first; equal neighbours are one entry with the time of the last.
        added, removed: times and numbers of added or removed replicas, oldest first.
    """

    #: How long entries are kept, in seconds: the maximum window of settings, so that changed settings find them.
    KEPT_SECONDS = 3600.0

    recommendations: deque[_Run] = field(default_factory=deque)
    added: deque[tuple[float, int]] = field(default_factory=deque)
    removed: deque[tuple[float, int]] = field(default_factory=deque)

    def recommend(self, replicas: int, now: float) -> None:
        """Record a recommendation, before any limit."""
        if self.recommendations and self.recommendations[-1].value == replicas:
            self.recommendations[-1].last = now
        else:
            self.recommendations.append(_Run(replicas, now))
        while self.recommendations[0].last < now - self.KEPT_SECONDS:
            self.recommendations.popleft()

    def change(self, before: int, after: int, now: float) -> None:
        """Record a change of the number of replicas."""
        if after > before:
            self.added.append((now, after - before))
        elif after < before:
            self.removed.append((now, before - after))
        for changes in (self.added, self.removed):
            while changes and changes[0][0] < now - self.KEPT_SECONDS:
                changes.popleft()

    def stabilized(self, desired: int, current: int, behavior: Behavior, now: float) -> int:
        """Return `current`, raised to the lowest recommendation of scaleUp's window, then lowered to the highest of
        scaleDown's.

        Both windows include `desired`. As in HPA's controller, an earlier recommendation above `desired` can keep
        the current number, but does not raise it again.
        """
        lowest = min([desired, *self._recent(behavior.scale_up, now)])
        highest = max([desired, *self._recent(behavior.scale_down, now)])
        return min(max(current, lowest), highest)

    def _recent(self, rules: Rules, now: float) -> list[int]:
        cutoff = now - rules.stabilization_window_seconds
        return [run.value for run in self.recommendations if run.last > cutoff]

    def limit_up(self, current: int, rules: Rules, now: float) -> int:
        """Return the maximum number of replicas that the policies permit now; at least `current`."""
        if rules.select_policy == "Disabled":
            return current
        proposals = list[int]()
        for policy in rules.policies:
            start = self._at_start(current, policy.period_seconds, now)
            percent = math.ceil(start * (1 + policy.value / 100))  # rounded up, so that one replica can become two
            proposals.append(start + policy.value if policy.type == "Pods" else percent)
        return max(current, min(proposals) if rules.select_policy == "Min" else max(proposals))

    def limit_down(self, current: int, rules: Rules, now: float) -> int:
        """Return the minimum number of replicas that the policies permit now; at most `current`."""
        if rules.select_policy == "Disabled":
            return current
        proposals = list[int]()
        for policy in rules.policies:
            start = self._at_start(current, policy.period_seconds, now)
            percent = int(start * (1 - policy.value / 100))
            proposals.append(start - policy.value if policy.type == "Pods" else percent)
        return min(current, max(proposals) if rules.select_policy == "Min" else min(proposals))

    def _at_start(self, current: int, period: float, now: float) -> int:
        """Return the number of replicas at the start of a period that ends now, from the autoscaler's changes alone."""
        cutoff = now - period
        added = sum(number for time, number in self.added if time > cutoff)
        removed = sum(number for time, number in self.removed if time > cutoff)
        return current - added + removed
