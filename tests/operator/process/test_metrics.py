"""The operator's metrics: every series with its labels."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from stoker_operator.objects.facts import Key
from stoker_operator.process.metrics import Metrics
from stoker_operator.process.scaling_metrics import EndpointScaling, ScalingState
from stoker_operator.reconcile.reconcile import Outcome

from ...support import golden

#: State of an endpoint with all values known.
SCALING = ScalingState(
    {
        Key("default", "demo"): EndpointScaling(
            desired=3,
            ready=1,
            min_replicas=0,
            max_replicas=4,
            metric="pendingRequests",
            target=2.0,
            demand=6.5,
            requests={"held": 1, "queued": 2, "in_flight": 3},
            phase="Active",
            reason="DesiredWithinRange",
            start_seconds=12.5,
            num_up=5,
            num_down=4,
            num_starts=3,
            num_failures=1,
        )
    },
    gateway_replicas=(2, 1),
)

PAGE = Path(__file__).parents[3] / "docs/guides/operations.md"


def test_guide_names_existing_metrics() -> None:
    metrics = Metrics()
    metrics.ask_endpoints(dict)
    metrics.ask_scaling(ScalingState)
    named = {name.removesuffix("_total") for name in re.findall(r"`(stoker_operator_\w+)`", PAGE.read_text())}
    counted = {each.name for each in metrics.registry.collect() if each.name.startswith("stoker_operator_")}
    assert named and named <= counted


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
    metrics.ask_scaling(lambda: SCALING)
    golden.check("operator-metrics.txt", golden.series(metrics.text().decode(), ("stoker_operator_",)))
