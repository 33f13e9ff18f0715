"""Metrics of key usage: no series remains of a removed key."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from stoker_gateway.usage.metrics import UsageMetrics

from .test_billing import ENDED


def test_series_come_and_go_with_keys() -> None:
    registry = CollectorRegistry()
    metrics = UsageMetrics(registry, ["team", "other"])
    for key in ("team", "team", "other", "unknown", ""):
        metrics.ended(replace(ENDED, key=key))
    about = {"key": "team", "model": "m"}
    for kind, count in (("prompt", 6), ("cached", 2), ("output", 4)):
        assert registry.get_sample_value("stoker:gateway_tokens_total", about | {"kind": kind}) == count
    assert registry.get_sample_value("stoker:gateway_key_requests_total", about | {"code": "200"}) == 2
    assert b"unknown" not in generate_latest(registry)
    metrics.set_keys(["other"])
    metrics.ended(ENDED)  # its last request
    exposition = generate_latest(registry)
    assert b'key="team"' not in exposition and b'key="other"' in exposition and b'key=""' in exposition
    metrics.forget_model("m")
    assert b'model="m"' not in generate_latest(registry)
