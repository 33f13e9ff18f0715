"""Metrics of scaled endpoints, read from the scaling loop at each scrape, so that deleted endpoints have no series.

Endpoints are identified by ``endpoint_namespace`` and ``endpoint_name``, because the Prometheus Operator sets
the labels ``namespace`` and ``endpoint``.
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
    """The current scaling of an endpoint.

    Attributes:
        desired, ready: numbers of desired and of ready replicas.
        min_replicas, max_replicas, metric, target: values of ``spec.scaling``, with defaults.
        demand: see `Recommendation.demand`.
        requests: numbers of held, queued and in-flight requests in the gateway, or None while no gateway replica
            answers.
        phase, reason: of the last recommendation.
        start_seconds: learned start-up time in seconds, or None if unknown.
        num_up, num_down, num_starts, num_failures: see `ScalingProgress`.
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
    """The current state of the scaling loop; empty while this replica of the operator does not scale.

    Attributes:
        endpoints: the scaled endpoints.
        gateway_replicas: numbers of gateway replicas with and without a valid report; None without polling.
    """

    endpoints: Mapping[Key, EndpointScaling] = field(default_factory=dict)
    gateway_replicas: tuple[int, int] | None = None


class ScalingCollector(Collector):
    """The metrics of the scaling that `state` returns at each scrape."""

    def __init__(self, state: Callable[[], ScalingState]) -> None:
        self._state = state

    def describe(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Return the metrics without samples."""
        return self._families(ScalingState())

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Return the current values."""
        return self._families(self._state())

    def _families(self, state: ScalingState) -> list[GaugeMetricFamily | CounterMetricFamily]:
        desired = _gauge("desired_replicas", "Desired number of replicas of the endpoint.")
        ready = _gauge("ready_replicas", "Number of ready replicas of the endpoint.")
        min_replicas = _gauge("min_replicas", "minReplicas of the endpoint.")
        max_replicas = _gauge("max_replicas", "maxReplicas of the endpoint.")
        demand = _gauge("metric_value", "Amount of the scaling metric for which the endpoint needs replicas.", "metric")
        target = _gauge("metric_target", "Target value of the scaling metric for each replica.", "metric")
        requests = _gauge("requests", "Requests for the endpoint in the gateway: held, queued, in_flight.", "state")
        status = _gauge("status", "1 for the present phase and reason of scaling.", "phase", "reason")
        start = _gauge("start_seconds", "Start-up time of replicas, learned from recent starts.")
        changes = _counter("rescales", "Changes of the number of replicas by the autoscaler, up or down.", "direction")
        starts = _counter("starts_from_zero", "Number of times that the number of replicas rose from zero.")
        failures = _counter("start_failures", "Failed starts while no replica was ready.")
        gateway = GaugeMetricFamily(
            f"{_PREFIX}gateway_replicas",
            "Replicas of the gateway that the operator polls: reporting, missing.",
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
