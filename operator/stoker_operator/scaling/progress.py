"""Counts changes and starts of one endpoint's replicas, for metrics. Pure."""

from __future__ import annotations

from typing import Literal

from stoker_operator.scaling.autoscaler import Observation, Recommendation

#: Stages of a start from zero: from the first held request until the number of replicas is written, and from then until
#: the first pod is ready.
Stage = Literal["written", "ready"]


class ScalingProgress:
    """Counts changes and starts, and measures starts from zero.

    A stage in progress at the first update is not measured, because its beginning is unknown.

    Attributes:
        num_up, num_down: how often the autoscaler raised and lowered the number of replicas.
        num_starts: how often that number rose from zero.
        num_failures: number of starts that failed while no replica was ready.
    """

    def __init__(self) -> None:
        self.num_up = self.num_down = self.num_starts = self.num_failures = 0
        self._before: Observation | None = None
        self._held_at: float | None = None  # since when requests are held at zero
        self._written_at: float | None = None  # when the number of replicas rose from zero, until the start ends
        self._has_failed = False

    def update(self, observation: Observation, recommended: Recommendation, now: float) -> list[tuple[Stage, float]]:
        """Add an observation and its recommendation.

        Returns:
            The stages of starts from zero that have ended, with their durations in seconds.
        """
        self.num_up += recommended.change > 0
        self.num_down += recommended.change < 0
        before, self._before = self._before, observation
        if before is None:
            return []
        ended = list[tuple[Stage, float]]()
        if observation.replicas and not before.replicas:
            self.num_starts += 1
            self._written_at = now
            if self._held_at is not None:
                ended.append(("written", now - self._held_at))
        if not _holds_at_zero(observation):
            self._held_at = None
        elif not _holds_at_zero(before):
            self._held_at = now
        if observation.ready and self._written_at is not None and not self._has_failed:
            ended.append(("ready", now - self._written_at))
        if observation.ready or not observation.replicas:
            self._written_at, self._has_failed = None, False
        elif observation.start_failure and not before.start_failure and not self._has_failed:
            self.num_failures += 1
            self._has_failed = True
        return ended


def _holds_at_zero(observation: Observation) -> bool:
    return not observation.replicas and observation.signals is not None and observation.signals.held > 0
