"""What the operator counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from stoker_operator.process.scaling_metrics import ScalingCollector, ScalingState

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STARTS = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """The metrics of one process; each part reports here what it does."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._reconciles = Counter(
            "stoker_operator_reconciles_total",
            "Reconciles of an endpoint, by what came of them: an outcome, or error.",
            ("outcome",),
            registry=self.registry,
        )
        self._reconcile_seconds = Histogram(
            "stoker_operator_reconcile_duration_seconds",
            "How long a reconcile took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._errors = Counter(
            "stoker_operator_reconcile_errors_total",
            "Reconciles that failed, by the HTTP status of the API server's answer (0: none), or bug.",
            ("cause",),
            registry=self.registry,
        )
        self._leader = Gauge(
            "stoker_operator_leader", "1 where this replica is the one that writes.", registry=self.registry
        )
        self._admissions = Counter(
            "stoker_operator_admissions_total",
            "Reviews that the webhook answered: allowed, denied, malformed or error.",
            ("verdict",),
            registry=self.registry,
        )
        self._admission_seconds = Histogram(
            "stoker_operator_admission_duration_seconds",
            "How long the webhook took to answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._certificate_expires = Gauge(
            "stoker_operator_webhook_certificate_expiry_timestamp_seconds",
            "When the certificate that the webhook serves expires; 0 where it serves none.",
            registry=self.registry,
        )
        self._starts_from_zero = Histogram(
            "stoker_operator_scaling_start_from_zero_duration_seconds",
            "Starts from zero: from a held request to the number of replicas that is written (written), and from there "
            "to the first replica that is ready (ready).",
            ("stage",),
            buckets=_STARTS,
            registry=self.registry,
        )
        for stage in ("written", "ready"):
            self._starts_from_zero.labels(stage)  # so that the first one is an increase
        self._scaling_errors = Counter(
            "stoker_operator_scaling_errors_total",
            "Looks at endpoints to scale that failed, which is a bug.",
            registry=self.registry,
        )

    def reconciled(self, outcome: str, seconds: float) -> None:
        """A reconcile ended with this outcome."""
        self._reconciles.labels(outcome.lower()).inc()
        self._reconcile_seconds.observe(seconds)

    def failed(self, cause: int | str, seconds: float) -> None:
        """A reconcile ended with an error: the status of the API server's answer, or ``bug``."""
        self._errors.labels(str(cause)).inc()
        self.reconciled("error", seconds)

    def reviewed(self, verdict: str, seconds: float) -> None:
        """The webhook answered."""
        self._admissions.labels(verdict).inc()
        self._admission_seconds.observe(seconds)

    def certificate_loaded(self, expires: datetime) -> None:
        """The webhook serves this certificate now."""
        self._certificate_expires.set(expires.timestamp())

    def ask_leading(self, leading: Callable[[], bool]) -> None:
        """Sets what is called, at each scrape, for whether this replica leads."""
        self._leader.set_function(leading)

    def ask_endpoints(self, conditions: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Sets what is called, at each scrape, for how many endpoints have a condition (type, status)."""
        self.registry.register(_Endpoints(conditions))

    def ask_scaling(self, state: Callable[[], ScalingState]) -> None:
        """Sets what is called, at each scrape, for how endpoints are scaled."""
        self.registry.register(ScalingCollector(state))

    def started_from_zero(self, stage: str, seconds: float) -> None:
        """A stage of an endpoint's start from zero has ended."""
        self._starts_from_zero.labels(stage).observe(seconds)

    def scaling_failed(self) -> None:
        """An endpoint, or all of them, could not be looked at: a bug."""
        self._scaling_errors.inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)


class _Endpoints(Collector):
    def __init__(self, conditions: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        self._conditions = conditions

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing is counted before the first scrape."""
        return [self._family()]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The counts of now."""
        family = self._family()
        for (condition, status), count in sorted(self._conditions().items()):
            family.add_metric((condition, status), count)
        return [family]

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "stoker_operator_endpoints",
            "Endpoints by condition and its status.",
            labels=("condition", "status"),
        )
