"""Probes and metrics, as a kubelet and Prometheus request them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from stoker_operator.process.health import Health
from stoker_operator.process.metrics import Metrics

Ask = Callable[[str], Awaitable[tuple[int, str]]]


def probed(
    metrics: Metrics, ready: dict[str, Callable[[], bool]], probe: Callable[[Health, Ask], Awaitable[None]]
) -> None:
    async def main() -> None:
        health = Health("127.0.0.1:0", metrics, ready)
        await health.start()
        async with aiohttp.ClientSession() as session:

            async def ask(path: str) -> tuple[int, str]:
                async with session.get(f"http://127.0.0.1:{health.port}{path}") as response:
                    return response.status, await response.text()

            await probe(health, ask)
        await health.stop()

    asyncio.run(main())


def test_readiness_requires_all_checks_and_ends_at_shutdown() -> None:
    filled, certified = False, True

    async def probe(health: Health, ask: Ask) -> None:
        nonlocal filled
        assert await ask("/healthz") == (200, "ok\n")
        assert await ask("/readyz") == (503, "not yet: the store is filled\n")
        filled = True
        assert await ask("/readyz") == (200, "ok\n")
        health.leave()
        assert await ask("/readyz") == (503, "shutting down\n")
        assert await ask("/healthz") == (200, "ok\n")

    probed(Metrics(), {"the store is filled": lambda: filled, "there is a certificate": lambda: certified}, probe)


def test_metrics_count_recorded_events() -> None:
    metrics = Metrics()
    metrics.reconciled("settled", 0.2)
    metrics.failed(500, 0.1)
    metrics.failed("bug", 0.1)
    metrics.reviewed("denied", 0.004)
    metrics.certificate_loaded(datetime(2030, 1, 1, tzinfo=UTC))
    leading = True
    metrics.ask_leading(lambda: leading)
    metrics.ask_endpoints(lambda: {("Ready", "True"): 3, ("Ready", "False"): 1})

    async def probe(_: Health, ask: Ask) -> None:
        status, text = await ask("/metrics")
        assert status == 200
        found = {
            (sample.name.removeprefix("stoker_operator_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert found["reconciles_total", "settled"] == 1
        assert found["reconciles_total", "error"] == 2
        assert found["reconcile_errors_total", "500"] == found["reconcile_errors_total", "bug"] == 1
        assert found["reconcile_duration_seconds_count",] == 3
        assert found["admissions_total", "denied"] == 1
        assert found["admission_duration_seconds_bucket", "0.005"] == 1
        assert found["webhook_certificate_expiry_timestamp_seconds",] == 1893456000
        assert found["leader",] == 1
        assert (found["endpoints", "Ready", "True"], found["endpoints", "Ready", "False"]) == (3, 1)
        assert found["process_resident_memory_bytes",] > 0

    probed(metrics, {}, probe)
