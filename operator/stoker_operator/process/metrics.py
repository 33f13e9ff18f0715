"""The operator's Prometheus metrics."""

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
    """The metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._reconciles = Counter(
            "stoker_operator_reconciles_total",
            "Reconciles of endpoints by outcome: settled, moving, held, changed, refused, yielded (to another operator "
            "or writer), gone, error.",
            ("outcome",),
            registry=self.registry,
        )
        self._reconcile_seconds = Histogram(
            "stoker_operator_reconcile_duration_seconds",
            "Duration of a reconcile.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._errors = Counter(
            "stoker_operator_reconcile_errors_total",
            "Failed reconciles by cause: the HTTP status of the API server's answer, 0 without an answer, or bug for "
            "an error in the operator.",
            ("cause",),
            registry=self.registry,
        )
        self._leader = Gauge(
            "stoker_operator_leader",
            "1 if this replica is the leader, the only one that writes.",
            registry=self.registry,
        )
        self._admissions = Counter(
            "stoker_operator_admissions_total",
            "Admission reviews answered by the webhook: allowed, denied, malformed or error.",
            ("verdict",),
            registry=self.registry,
        )
        self._admission_seconds = Histogram(
            "stoker_operator_admission_duration_seconds",
            "Time in which the webhook answers an admission review.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._certificate_expires = Gauge(
            "stoker_operator_webhook_certificate_expiry_timestamp_seconds",
            "Time at which the webhook's certificate expires; 0 if it has none.",
            registry=self.registry,
        )
        self._starts_from_zero = Histogram(
            "stoker_operator_scaling_start_from_zero_duration_seconds",
            "Duration of starts from zero: from a held request until the number of replicas is written (written), and "
            "from there until the first replica is ready (ready).",
            ("stage",),
            buckets=_STARTS,
            registry=self.registry,
        )
        for stage in ("written", "ready"):
            self._starts_from_zero.labels(stage)  # create the series, so that rate() sees the first start
        self._scaling_errors = Counter(
            "stoker_operator_scaling_errors_total",
            "Failed evaluations of endpoints' scaling, which are bugs.",
            registry=self.registry,
        )

    def reconciled(self, outcome: str, seconds: float) -> None:
        """Record outcome and duration of a reconcile."""
        self._reconciles.labels(outcome.lower()).inc()
        self._reconcile_seconds.observe(seconds)

    def failed(self, cause: int | str, seconds: float) -> None:
        """Record a failed reconcile: the HTTP status of the API server's answer, 0 without one, or ``bug``."""
        self._errors.labels(str(cause)).inc()
        self.reconciled("error", seconds)

    def reviewed(self, verdict: str, seconds: float) -> None:
        """Record an answer of the webhook."""
        self._admissions.labels(verdict).inc()
        self._admission_seconds.observe(seconds)

    def certificate_loaded(self, expires: datetime) -> None:
        """Record when the certificate that the webhook now uses expires."""
        self._certificate_expires.set(expires.timestamp())

    def ask_leading(self, leading: Callable[[], bool]) -> None:
        """Set the function that returns, at each scrape, whether this replica leads."""
        self._leader.set_function(leading)

    def ask_endpoints(self, conditions: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Set the function that returns, at each scrape, the number of endpoints by condition (type, status)."""
        self.registry.register(_Endpoints(conditions))

    def ask_scaling(self, state: Callable[[], ScalingState]) -> None:
        """Set the function that returns, at each scrape, the endpoints' scaling."""
        self.registry.register(ScalingCollector(state))

    def started_from_zero(self, stage: str, seconds: float) -> None:
        """Record the duration of a stage of an endpoint's start from zero."""
        self._starts_from_zero.labels(stage).observe(seconds)

    def scaling_failed(self) -> None:
        """Count a failed evaluation of the scaling of one endpoint, or of all. Each is a bug."""
        self._scaling_errors.inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Endpoints(Collector):
    def __init__(self, conditions: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        self._conditions = conditions

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the metric without samples."""
        return [self._family()]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the current counts."""
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
