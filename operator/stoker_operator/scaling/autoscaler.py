"""The autoscaler of one endpoint: computes the number of replicas and the reason from observations.

It does no I/O and has no clock. docs/design/autoscaling.md describes the phases and their meaning for the gateway.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from stoker_common.scaling.signals import Metric, Signals
from stoker_operator.scaling.behavior import Behavior, History
from stoker_operator.scaling.demand import Demand, has_missing_engines
from stoker_operator.scaling.start_time import ASSUMED_SECONDS, StartTime

#: Time in seconds in which gateway replicas may acknowledge a drain id (`status.scaling.drain`), which makes them hold
#: new requests. In the gateway, a drain id is valid for twice as long.
DRAIN_SECONDS: Final = 15.0
#: How long observations may show a number of replicas that the autoscaler has since changed, in seconds.
LAG_SECONDS: Final = 10.0
#: Minimum time between two drains of an endpoint, in seconds. By then the first drain id has expired in the gateway.
RETRY_SECONDS: Final = 60.0


class Phase(StrEnum):
    """What the gateway does with new requests.

    ACTIVE: it sends them to ready pods. DRAINING: it holds them while requests in flight finish. ZERO: it holds them,
    and no replica is desired.
    """

    ACTIVE = "Active"
    DRAINING = "Draining"
    ZERO = "Zero"


@dataclass(frozen=True)
class ScalingSettings:
    """`spec.scaling`, with defaults.

    Attributes:
        min_replicas, max_replicas: bounds of the number of replicas.
        metric, target: the metric, and its target value for each replica.
        behavior: limits of how fast the number of replicas changes.
        idle_seconds_to_zero: time without requests before an endpoint scales to zero, if `min_replicas` is 0.
    """

    min_replicas: int
    max_replicas: int
    metric: Metric
    target: float
    behavior: Behavior = field(default_factory=Behavior)
    idle_seconds_to_zero: float = 300.0


@dataclass(frozen=True)
class Observation:
    """The input of an update.

    Attributes:
        signals: the gateway's reports, or None if there is no gateway to poll.
        replicas: desired number of replicas in the workload object.
        ready: number of ready replicas.
        start_failure: why replicas do not start; empty if no failure is known.
        gateway_serves: whether a gateway serves the endpoint.
        drain, phase: values in the endpoint's status. Only the first update reads them, to recognize an endpoint at
            zero.
    """

    signals: Signals | None
    replicas: int
    ready: int
    start_failure: str = ""
    gateway_serves: bool = True
    drain: str = ""
    phase: Phase = Phase.ACTIVE


@dataclass(frozen=True)
class Recommendation:
    """The result of an update.

    Attributes:
        replicas: number of replicas to write.
        phase, drain: values for the endpoint's status. `drain` is the drain id; empty in the phase Active.
        reason, message, status: of the condition ``Scaling``.
        start_seconds: the learned start-up time in seconds, or None if unknown.
        change: `replicas` minus the number before this update.
        demand: amount of the metric from which the number of replicas is computed; None if unknown or not used.
    """

    replicas: int
    phase: Phase
    drain: str
    reason: str
    message: str
    start_seconds: float | None
    status: Literal["True", "False", "Unknown"]
    change: int = 0
    demand: float | None = None


class Autoscaler:
    """The state of one endpoint's scaling.

    Args:
        settings: the endpoint's settings. They may be replaced at any time; the history is kept.
        now: monotonic time, in seconds.
        start_seconds: the start-up time in the endpoint's status, if it has one.
        new_drain_id: returns a new drain id.
    """

    def __init__(
        self,
        settings: ScalingSettings,
        now: float,
        start_seconds: float | None = None,
        new_drain_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.settings = settings
        self._new_drain_id = new_drain_id
        self._now = now
        self._history = History()
        self._demand = Demand()
        self._start_time = StartTime(start_seconds)
        self._phase: Phase | None = None  # None before the first update
        self._drain = ""
        self._drain_started_at = -math.inf
        self._replicas = 0  # the last recommendation, or a later number of another writer
        self._written: deque[tuple[int, float]] = deque(maxlen=64)  # earlier recommendations and their end times
        self._observed = 0  # the workload's count at the last update
        self._active_since = now
        self._ready_since: float | None = None
        self._busy_at = -math.inf

    def update(self, observation: Observation, now: float) -> Recommendation:
        """Compute a recommendation. If `now` is not finite, or before the last `now`, the last one is used."""
        now = self._now = max(now, self._now) if math.isfinite(now) else self._now
        self._adopt(observation, now)
        self._start_time.observe(observation.ready, bool(observation.start_failure), now)
        if observation.ready == 0:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = now
        signals = observation.signals
        if signals is not None and signals.is_busy:
            self._busy_at = now
        if self._phase is Phase.DRAINING:
            self._continue_draining(observation, now)
        elif self._phase is Phase.ZERO:
            self._continue_zero(observation, now)
        elif self._is_idle(observation, now):
            self._phase, self._drain, self._drain_started_at = Phase.DRAINING, self._new_drain_id(), now
        if self._phase is Phase.ZERO:
            return self._recommend(0, "ScaledToZero", "No requests: no replica runs until a request is held.", now)
        if self._phase is Phase.DRAINING:
            return self._recommend(
                self._replicas, "Draining", "No requests: waiting until no gateway replica sends any to pods.", now
            )
        return self._scale(observation, now)

    # Phases

    def _adopt(self, observation: Observation, now: float) -> None:
        """Adopt the state of status and workload at the first update, and a count that another writer has set."""
        if self._phase is None:
            self._replicas = observation.replicas
            self._history.recommend(observation.replicas, now)  # used in scaleDown's first window
            # A new leader does not know a drain's age, so it ends the drain of an endpoint that still has replicas.
            at_zero = observation.replicas == 0 and observation.phase is not Phase.ACTIVE and observation.drain != ""
            self._phase = Phase.ZERO if at_zero else Phase.ACTIVE
            self._drain = observation.drain if at_zero else ""
        elif observation.replicas not in (self._observed, self._replicas):
            while self._written and self._written[0][1] < now - LAG_SECONDS:
                self._written.popleft()
            if all(observation.replicas != count for count, _ in self._written):
                self._replicas = observation.replicas
        self._observed = observation.replicas

    def _continue_draining(self, observation: Observation, now: float) -> None:
        signals = observation.signals
        is_held = signals is not None and bool(signals.held or signals.queued)
        if is_held or not self._may_be_zero(observation) or now - self._drain_started_at >= DRAIN_SECONDS:
            self._activate(now)
        elif signals is not None and signals.acknowledged(self._drain):
            self._phase = Phase.ZERO

    def _continue_zero(self, observation: Observation, now: float) -> None:
        signals = observation.signals
        if (signals is not None and signals.is_busy) or not self._may_be_zero(observation):
            self._activate(now)
        elif observation.replicas > 0:
            # Zero is not written yet, or another writer has replaced it. It is written only while that is safe.
            is_safe = signals is not None and signals.acknowledged(self._drain)
            if not is_safe or now - self._drain_started_at >= DRAIN_SECONDS:
                self._activate(now)

    def _activate(self, now: float) -> None:
        self._phase, self._drain, self._active_since = Phase.ACTIVE, "", now

    def _may_be_zero(self, observation: Observation) -> bool:
        return self.settings.min_replicas <= 0 and observation.gateway_serves

    def _is_idle(self, observation: Observation, now: float) -> bool:
        """Return whether a drain may start: the endpoint had no requests for the required time since a replica became
        ready or, if starts fail, since the endpoint became active."""
        signals, needed = observation.signals, self.settings.idle_seconds_to_zero
        if signals is None or signals.missing or signals.is_busy or not self._may_be_zero(observation):
            return False
        if observation.replicas == 0 or signals.idle_seconds is None or now - self._drain_started_at < RETRY_SECONDS:
            return False
        since = (
            self._ready_since if self._ready_since is not None or not observation.start_failure else self._active_since
        )
        if since is None:
            return False
        return min(now - max(since, self._busy_at), signals.idle_seconds) >= needed

    # The count

    def _scale(self, observation: Observation, now: float) -> Recommendation:
        """Return the recommendation in the phase Active, with at least 1 replica."""
        settings, behavior = self.settings, self.settings.behavior
        lowest, highest = max(1, settings.min_replicas), max(1, settings.max_replicas)
        signals, current = observation.signals, self._replicas
        if not observation.gateway_serves:
            count = max(lowest, min(current, highest))
            return self._recommend(count, "NoGateway", f"{_replicas(count)}: no gateway serves the endpoint.", now)
        desired, total, missing = self._desired(observation, now)
        if missing:
            desired = max(desired, current)
        self._history.recommend(desired, now)
        if current > highest or (0 < current < lowest):  # as in HPA, changed bounds apply at once
            stabilized = limited = max(lowest, min(current, highest))
        else:
            stabilized = self._history.stabilized(desired, current, behavior, now)
            limited = max(lowest, min(self._within_policies(stabilized, current, now), highest))
        amount = (
            f"{settings.metric} is {total:.3g}, target {settings.target:g} per replica: {_replicas(desired)} needed"
        )
        if signals is None or not signals.drained:
            reason, why = "MissingSignals", "no gateway replica answers, so no replica is removed"
        elif missing:
            reason, why = "MissingSignals", f"no report from {missing}, so no replica is removed"
        elif observation.start_failure:
            reason, why = "StartFailed", f"replicas do not start: {observation.start_failure}"
        elif desired > highest and limited == highest:
            reason, why = "TooManyReplicas", f"maxReplicas is {highest}"
        elif desired < lowest and limited == lowest:
            reason, why = "TooFewReplicas", f"minReplicas is {settings.min_replicas}"
            if settings.min_replicas == 0:
                reason, why = (
                    "DesiredWithinRange",
                    f"the endpoint scales to zero after {settings.idle_seconds_to_zero:g} idle seconds",
                )
        elif stabilized != desired:
            reason = "ScaleUpStabilized" if desired > current else "ScaleDownStabilized"
            window = behavior.scale_up if desired > current else behavior.scale_down
            seconds = window.stabilization_window_seconds
            why = f"the stabilization window of {seconds:g} s keeps {_replicas(stabilized)}"
        elif limited != stabilized:
            reason = "ScaleUpLimit" if stabilized > limited else "ScaleDownLimit"
            why = f"behavior's policies permit {_replicas(limited)} now"
        else:
            reason, why = "DesiredWithinRange", ""
        known = total if signals is not None and signals.drained else None
        return self._recommend(limited, reason, f"{amount}{'; ' if why else ''}{why}.", now, known)

    def _desired(self, observation: Observation, now: float) -> tuple[int, float, str]:
        """Return the desired replicas before limits, the demand, and the names of missing reports (empty: none)."""
        settings, signals, current = self.settings, observation.signals, self._replicas
        if signals is None:
            return current, 0.0, "the gateway"
        is_starting = observation.ready < current
        start_seconds = self._start_time.seconds
        total = self._demand.update(
            signals,
            settings.metric,
            is_starting,
            ASSUMED_SECONDS if start_seconds is None else start_seconds,
            now,
        )
        missing = ", ".join(signals.missing[:3])
        if not missing and has_missing_engines(signals, settings.metric, observation.ready):
            missing = "some engines"
        ratio = total / settings.target
        # Bounded at about twice maxReplicas: larger numbers have no further effect.
        desired = math.ceil(min(ratio, 2.0 * settings.max_replicas + 1))
        if current == 0:
            by_held = signals.held / settings.target if settings.metric != "kvCacheUsage" else 1.0
            desired = max(1, desired, math.ceil(min(by_held, 2.0 * settings.max_replicas + 1)))
        else:
            up, down = settings.behavior.scale_up.tolerance, settings.behavior.scale_down.tolerance
            # Compared as in HPA: due to rounding, `abs(ratio / current - 1) <= 0.1` is false for 1.1.
            if 1.0 - down <= ratio / current <= 1.0 + up:
                desired = current
        if is_starting and signals.waiting:
            # The demand excludes requests that wait for starting replicas, so these replicas must not be removed.
            by_waiting = signals.waiting / settings.target if settings.metric != "kvCacheUsage" else current
            desired = max(desired, math.ceil(min(by_waiting, current)))
        if signals.held or signals.queued or signals.in_flight:
            desired = max(1, desired)
        return desired, total, missing

    def _within_policies(self, stabilized: int, current: int, now: float) -> int:
        behavior = self.settings.behavior
        if stabilized > current:
            return max(1, min(stabilized, self._history.limit_up(current, behavior.scale_up, now)))
        return max(stabilized, self._history.limit_down(current, behavior.scale_down, now))

    def _recommend(
        self, replicas: int, reason: str, message: str, now: float, demand: float | None = None
    ) -> Recommendation:
        change = replicas - self._replicas
        if change:
            self._history.change(self._replicas, replicas, now)
            self._written.append((self._replicas, now))
            self._start_time.change(self._replicas, replicas, now)
            self._replicas = replicas
        status: Literal["True", "False", "Unknown"] = "True"
        if reason in ("NoGateway", "StartFailed"):
            status = "False"
        elif reason == "MissingSignals":
            status = "Unknown"
        phase = self._phase or Phase.ACTIVE
        learned = self._start_time.seconds
        return Recommendation(replicas, phase, self._drain, reason, message, learned, status, change, demand)


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
