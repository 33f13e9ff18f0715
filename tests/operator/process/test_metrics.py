"""What the operator counts: every series with its labels."""

from __future__ import annotations

from datetime import UTC, datetime

from stoker_operator.process.metrics import Metrics
from stoker_operator.reconcile.reconcile import Outcome

from ...support import golden


def test_golden_metrics() -> None:
    metrics = Metrics()
    for outcome in Outcome:
        metrics.reconciled(outcome.value, 0.1)
    for cause in (0, 409, "bug"):
        metrics.failed(cause, 0.1)
    for verdict in ("allowed", "denied", "malformed", "error"):
        metrics.reviewed(verdict, 0.01)
    metrics.certificate_loaded(datetime(2030, 1, 1, tzinfo=UTC))
    metrics.ask_leading(lambda: True)
    metrics.ask_endpoints(lambda: {("Ready", "True"): 1, ("Ready", "False"): 2})
    golden.check("operator-metrics.txt", golden.series(metrics.text().decode(), ("stoker_operator_",)))
