"""Metrics of endpoints that are scaled, read from the scaling loop at each scrape: what is over has no series.

Endpoints are named by ``endpoint_namespace`` and ``endpoint_name``: ``namespace`` and ``endpoint`` are labels that
Prometheus gives what it scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from stoker_operator.objects.facts import Key

_PREFIX: Final = "stoker_operator_scaling_"
_ENDPOINT: Final = ("endpoint_namespace", "endpoint_name")


@dataclass(frozen=True)
class EndpointScaling:
    """How an endpoint is scaled now.

    Attributes:
        desired, ready: replicas that there should be, and that are ready.
        min_replicas, max_replicas, metric, target: as ``spec.scaling`` has them, with defaults.
        demand: how much of the metric replicas are needed for; None: unknown.
        requests: held, queued and in flight, as the gateway reports them; None: no replica of it answers.
        phase, reason: as status has them.
        start_seconds: the start-up time that was learned; None: nothing yet.
        num_up, num_down, num_starts, num_failures: of changes, starts from zero and failed starts, since this replica
            of the operator leads.
    """

    desired: int
    ready: int
    min_replicas: int
    max_replicas: int
    metric: str
    target: float
    demand: float | None
    requests: Mapping[str, int] | None
    phase: str
    reason: str
    start_seconds: float | None
    num_up: int
    num_down: int
    num_starts: int
    num_failures: int


@dataclass(frozen=True)
class ScalingState:
    """What the loop that scales knows now; nothing on a replica of the operator that does not lead.

    Attributes:
        endpoints: those that are scaled.
        gateway_replicas: how many replicas of the gateway report, and how many are missing; None: none is asked.
    """

    endpoints: Mapping[Key, EndpointScaling] = field(default_factory=dict)
    gateway_replicas: tuple[int, int] | None = None


class ScalingCollector(Collector):
    """The metrics of `state`, which is called at each scrape."""

    def __init__(self, state: Callable[[], ScalingState]) -> None:
        self._state = state

    def describe(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """The same metrics without samples."""
        return self._families(ScalingState())

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """The values of now."""
        return self._families(self._state())

    def _families(self, state: ScalingState) -> list[GaugeMetricFamily | CounterMetricFamily]:
        desired = _gauge("desired_replicas", "Replicas that an endpoint should have.")
        ready = _gauge("ready_replicas", "Replicas of it that are ready.")
        min_replicas = _gauge("min_replicas", "Its minReplicas.")
        max_replicas = _gauge("max_replicas", "Its maxReplicas.")
        demand = _gauge("metric_value", "How much of the metric its replicas are needed for.", "metric")
        target = _gauge("metric_target", "How much of it each replica should have.", "metric")
        requests = _gauge("requests", "Requests for it in the gateway: held, queued, in_flight.", "state")
        status = _gauge("status", "1: the phase, and the reason of its condition Scaling, now.", "phase", "reason")
        start = _gauge("start_seconds", "How long its replicas take to start, by the last ones that did.")
        changes = _counter("rescales", "Changes of its number of replicas by the autoscaler, up or down.", "direction")
        starts = _counter("starts_from_zero", "How often its number of replicas rose from zero.")
        failures = _counter("start_failures", "Starts that failed, while none of its replicas was ready.")
        gateway = GaugeMetricFamily(
            f"{_PREFIX}gateway_replicas",
            "Replicas of the gateway that are asked for reports: reporting, missing.",
            labels=("state",),
        )
        for key, each in sorted(state.endpoints.items()):
            desired.add_metric(key, each.desired)
            ready.add_metric(key, each.ready)
            min_replicas.add_metric(key, each.min_replicas)
            max_replicas.add_metric(key, each.max_replicas)
            if each.demand is not None:
                demand.add_metric((*key, each.metric), each.demand)
            target.add_metric((*key, each.metric), each.target)
            for name, count in (each.requests or {}).items():
                requests.add_metric((*key, name), count)
            status.add_metric((*key, each.phase, each.reason), 1)
            if each.start_seconds is not None:
                start.add_metric(key, each.start_seconds)
            changes.add_metric((*key, "up"), each.num_up)
            changes.add_metric((*key, "down"), each.num_down)
            starts.add_metric(key, each.num_starts)
            failures.add_metric(key, each.num_failures)
        if state.gateway_replicas is not None:
            for name, count in zip(("reporting", "missing"), state.gateway_replicas, strict=True):
                gateway.add_metric((name,), count)
        gauges = (desired, ready, min_replicas, max_replicas, demand, target, requests, status, start, gateway)
        return [*gauges, changes, starts, failures]


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=(*_ENDPOINT, *labels))


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{_PREFIX}{name}", text, labels=(*_ENDPOINT, *labels))
