"""Scales endpoints with ``spec.scaling``: polls the gateway, and wakes an endpoint when its recommendation changes.

    gateway's replicas ─► ScalingLoop: one Autoscaler per endpoint ─► recommendation ─► wake ─► reconcile

Only the leading replica of the operator scales. A recommendation is published at once if `_essence` differs, and
otherwise once a minute, so that the endpoint's status does not change with each poll.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

from stoker_common.scaling.gateway_signals import GatewaySignals
from stoker_common.scaling.signals import GatewayReport, combine
from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.api.v1alpha1.scaling import Scaling, ScalingRules
from stoker_operator.api.violation import Refused
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import MAIN, Child, Key, Object, Rollout
from stoker_operator.objects.owner import Owner
from stoker_operator.process.metrics import Metrics
from stoker_operator.process.scaling_metrics import EndpointScaling, ScalingState
from stoker_operator.reconcile.decide import is_ours
from stoker_operator.reconcile.routing import Route
from stoker_operator.scaling.autoscaler import Autoscaler, Observation, Phase, Recommendation, ScalingSettings
from stoker_operator.scaling.behavior import SCALE_DOWN, SCALE_UP, Behavior, Policy, Rules
from stoker_operator.scaling.progress import ScalingProgress
from stoker_operator.workloads.composition import Composition

logger = logging.getLogger(__name__)

#: Pause between two polls of the gateway, in seconds.
PERIOD_S: Final = 0.5
#: Interval of publishing recommendations of equal `_essence`, in seconds.
_MESSAGE_S: Final = 60.0
#: Maximum age of an observation that is exported as metrics, in seconds.
_STALE_S: Final = 30.0


@dataclass
class _Scaled:
    """A scaled endpoint.

    Attributes:
        uid, generation: uid and generation of the manifest whose settings `autoscaler` has.
        published, published_at: the recommendation that reconciles use, and when it was published.
        progress: counts changes and starts of the replicas.
        observed, observed_at: the endpoint's scaling for metrics, and the time of the observation.
    """

    uid: str
    generation: int
    autoscaler: Autoscaler
    published: Recommendation | None = None
    published_at: float = 0.0
    progress: ScalingProgress = field(default_factory=ScalingProgress)
    observed: EndpointScaling | None = None
    observed_at: float = 0.0


class ScalingLoop:
    """The autoscalers of all endpoints with ``spec.scaling``.

    Args:
        signals: polls the gateway's replicas; None without a gateway that reports its requests.
        store: the watched objects.
        composition: the workloads of an endpoint.
        route: returns the gateway's route to an endpoint.
        is_working: returns whether this replica leads and has listed the whole cluster.
        wake: requests a reconcile of an endpoint.
        metrics: the operator's metrics.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        signals: GatewaySignals | None,
        store: Store,
        composition: Composition,
        route: Callable[[Key], Route | None],
        is_working: Callable[[], bool],
        wake: Callable[[Key], None],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signals = signals
        self._store = store
        self._composition = composition
        self._route = route
        self._is_working = is_working
        self._wake = wake
        self._metrics = metrics
        self._clock = clock
        self._scaled: dict[Key, _Scaled] = {}
        self._gateway_replicas: tuple[int, int] | None = None
        metrics.ask_scaling(self.state)

    def recommendation(self, key: Key) -> Recommendation | None:
        """Return the recommendation for an endpoint, or None while there is none. Thread-safe."""
        scaled, document = self._scaled.get(key), self._store.get(KIND, *key)
        if scaled is None or document is None or document["metadata"]["uid"] != scaled.uid:
            return None  # also if it belongs to an earlier endpoint of this name
        return scaled.published

    def state(self) -> ScalingState:
        """Return the endpoints' current scaling; empty if this replica does not lead."""
        if not self._is_working():
            return ScalingState()
        oldest = self._clock() - _STALE_S
        endpoints = {
            key: each.observed for key, each in self._scaled.items() if each.observed and each.observed_at >= oldest
        }
        return ScalingState(endpoints, self._gateway_replicas)

    async def run(self) -> NoReturn:
        """Scale until cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except Exception:
                    self._metrics.scaling_failed()
                    logger.exception("endpoints are not scaled; this is a bug in the operator")
                await asyncio.sleep(PERIOD_S)
        finally:
            if self._signals is not None:
                await self._signals.close()

    async def _look(self) -> None:
        if not self._is_working():
            self._scaled.clear()
            self._gateway_replicas = None
            return
        endpoints = {
            Key(each["metadata"]["namespace"], each["metadata"]["name"]): each
            for each in self._store.all(KIND)
            if each["spec"].get("scaling") and "deletionTimestamp" not in each["metadata"]
        }
        for key in self._scaled.keys() - endpoints.keys():
            del self._scaled[key]
        if not endpoints:
            self._gateway_replicas = None
            return
        reports = await self._signals.poll() if self._signals is not None else {}
        if not self._is_working():
            return
        if self._signals is not None:
            missing = sum(report is None for report in reports.values())
            self._gateway_replicas = len(reports) - missing, missing
        for key, document in endpoints.items():
            try:
                self._update(key, document, reports)
            except Exception:
                self._metrics.scaling_failed()
                logger.exception("could not evaluate scaling; this is a bug in the operator", extra=key.reference)

    def _update(self, key: Key, document: Object, reports: dict[str, GatewayReport | None]) -> None:
        rollout = self._rollout(Owner(key.name, key.namespace, document["metadata"]["uid"]), key)
        scaled = self._of(key, document)
        if rollout is None or scaled is None:
            return
        status = (document.get("status") or {}).get("scaling") or {}
        route, now = self._route(key), self._clock()
        observation = Observation(
            signals=combine(reports, key) if self._signals is not None else None,
            replicas=rollout.desired,
            ready=rollout.available,
            start_failure=status.get("startFailure", ""),
            gateway_serves=route is not None and route.gateway is not None,
            drain=status.get("drain", ""),
            phase=_phase(status.get("phase")),
        )
        recommended = scaled.autoscaler.update(observation, now)
        for stage, seconds in scaled.progress.update(observation, recommended, now):
            self._metrics.started_from_zero(stage, seconds)
        scaled.observed = _observed(scaled.autoscaler.settings, observation, recommended, scaled.progress)
        scaled.observed_at = now
        before = scaled.published
        is_news = before is None or _essence(before) != _essence(recommended)
        if is_news or now - scaled.published_at >= _MESSAGE_S:
            scaled.published, scaled.published_at = recommended, now
        if is_news:
            self._wake(key)

    def _of(self, key: Key, document: Object) -> _Scaled | None:
        """Return the endpoint's autoscaler with the newest valid settings, or None without such settings."""
        uid, generation = document["metadata"]["uid"], document["metadata"]["generation"]
        scaled = self._scaled.get(key)
        if scaled is not None and (scaled.uid, scaled.generation) == (uid, generation):
            return scaled
        try:
            scaling = parse(document).spec.scaling
        except Refused:
            return scaled if scaled is not None and scaled.uid == uid else None
        if scaling is None:
            return None
        if scaled is not None and scaled.uid == uid:
            scaled.generation, scaled.autoscaler.settings = generation, settings_of(scaling)
            return scaled
        status = (document.get("status") or {}).get("scaling") or {}
        autoscaler = Autoscaler(settings_of(scaling), self._clock(), status.get("startSeconds"))
        self._scaled[key] = _Scaled(uid, generation, autoscaler)
        return self._scaled[key]

    def _rollout(self, owner: Owner, key: Key) -> Rollout | None:
        """Return the rollout of the pods that answer requests, or None while their workload does not exist."""
        for kind in self._composition.kinds:
            found = (each for each in self._store.of_endpoint(kind.name, key) if is_ours(owner, each))
            objects = [each for each in found if Child.of(each).workload == MAIN]
            if objects:
                return kind.rollout(objects)
        return None


def settings_of(scaling: Scaling) -> ScalingSettings:
    """Convert a spec into the autoscaler's settings, with defaults."""
    behavior = scaling.behavior
    return ScalingSettings(
        min_replicas=scaling.fewest,
        max_replicas=scaling.max_replicas,
        metric=scaling.measured,
        target=scaling.target,
        behavior=Behavior(
            _rules(behavior.scale_up if behavior else None, SCALE_UP),
            _rules(behavior.scale_down if behavior else None, SCALE_DOWN),
        ),
        idle_seconds_to_zero=scaling.idle_seconds,
    )


def _rules(given: ScalingRules | None, default: Rules) -> Rules:
    if given is None:
        return default
    window, tolerance = given.stabilization_window_seconds, given.tolerance
    return Rules(
        policies=(
            tuple(Policy(each.type, each.value, each.period_seconds) for each in given.policies)
            if given.policies
            else default.policies
        ),
        select_policy=given.select_policy or default.select_policy,
        stabilization_window_seconds=default.stabilization_window_seconds if window is None else window,
        tolerance=default.tolerance if tolerance is None else tolerance,
    )


def _observed(
    settings: ScalingSettings, observation: Observation, recommended: Recommendation, progress: ScalingProgress
) -> EndpointScaling:
    """Return an endpoint's scaling for metrics."""
    signals = observation.signals
    return EndpointScaling(
        desired=recommended.replicas,
        ready=observation.ready,
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        metric=settings.metric,
        target=settings.target,
        demand=recommended.demand,
        requests=(
            {"held": signals.held, "queued": signals.queued, "in_flight": signals.in_flight}
            if signals is not None and signals.drained
            else None
        ),
        phase=recommended.phase,
        reason=recommended.reason,
        start_seconds=recommended.start_seconds,
        num_up=progress.num_up,
        num_down=progress.num_down,
        num_starts=progress.num_starts,
        num_failures=progress.num_failures,
    )


def _phase(text: object) -> Phase:
    return next((each for each in Phase if each == text), Phase.ACTIVE)


def _essence(recommended: Recommendation) -> tuple[object, ...]:
    """Return the fields of a recommendation whose change wakes the endpoint."""
    return recommended.replicas, recommended.phase, recommended.drain, recommended.reason, recommended.status
