"""Log lines about requests and throughput, and their format."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from stoker_engine import logs
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.step_report import FinishedRequest, SchedulerStats, StepReport
from stoker_engine.server.observability import throughput_log
from stoker_engine.server.observability.access_log import skip_paths
from stoker_engine.server.observability.throughput_log import ThroughputLog

from ...support.waiting import until_async
from .conftest import FakeEngine, MakeClient

STATS = SchedulerStats(2, 1, 0.25, 100, 40, 0)
REQUEST = FinishedRequest("cmpl-1-0", FinishReason.STOP, 2, 16, 20, 16, 6, 3, 0, 1.5, 0.1, 0.2, 1.1, "r-1")


def test_each_finished_request_is_logged(
    make_client: MakeClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_client(disable_log_stats=True)
    assert engine.on_step is not None
    engine.on_step(StepReport(1, 0, 1, STATS, finished=[REQUEST]))
    (record,) = [record for record in caplog.records if record.name == "stoker_engine.requests"]
    assert record.getMessage() == (
        "finished cmpl-1-0: stop, prompt 20 tokens (16 cached), output 6 tokens in 2 sequences, "
        "queue 0.100 s, first token 0.300 s, total 1.500 s"
    )
    assert (vars(record)["prompt_tokens"], vars(record)["ttft_s"]) == (20, pytest.approx(0.3))
    assert vars(record)["request_id"] == "r-1"


@pytest.mark.parametrize("enabled", [True, False])
def test_prompts_are_logged_only_if_requested(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture, enabled: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    client = make_client(enable_log_requests=enabled, max_log_len=5)
    client.post("/v1/completions", json={"prompt": "sesame", "temperature": 0.25})
    client.post("/v1/completions", json={"prompt": "sesame", "temperature": -1})
    assert ("'^sesa'" in caplog.text) is enabled
    assert ("temperature=0.25" in caplog.text) is enabled
    assert "sesame" not in caplog.text


def test_throughput_is_logged_at_intervals_while_busy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(throughput_log, "INTERVAL_S", 0.05)
    times = iter([100.0, 110.0, 200.0, 220.0])

    async def run() -> None:
        log = ThroughputLog(clock=lambda: next(times))
        for lines in (1, 2):
            log.on_step(StepReport(64, 60, 4, STATS))
            log.on_step(StepReport(40, 0, 40, STATS))
            await until_async(lambda lines=lines: len(caplog.records) >= lines)

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if record.name == "stoker_engine.throughput"] == [
        "prompt 6.0 tokens/s, output 4.4 tokens/s, running 2, waiting 1, KV cache 25.0%, prefix hits 40.0%",
        "prompt 3.0 tokens/s, output 2.2 tokens/s, running 2, waiting 1, KV cache 25.0%, prefix hits 40.0%",
    ]


def test_the_throughput_log_covers_all_engines(caplog: pytest.LogCaptureFixture) -> None:
    """A dead engine's counts until its death are included."""
    caplog.set_level(logging.INFO)

    async def run() -> None:
        times = iter([0.0, 10.0, 20.0, 30.0])
        log = ThroughputLog(clock=lambda: next(times))
        for engine in range(2):
            log.on_step(
                StepReport(
                    64, 60, 4, SchedulerStats(2 + engine, 1, 0.25 + engine / 2, 100, 40 * engine, 0), engine=engine
                )
            )
        log.log()
        log.on_death(1)
        log.on_step(StepReport(1, 0, 10, SchedulerStats(5, 0, 0.5, 100, 10, 0)))
        log.log()

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if record.name == "stoker_engine.throughput"] == [
        "prompt 12.0 tokens/s, output 0.8 tokens/s, running 5, waiting 2, KV cache 50.0%, prefix hits 20.0%",
        "prompt 0.0 tokens/s, output 1.0 tokens/s, running 5, waiting 0, KV cache 50.0%, prefix hits 10.0%",
    ]


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, restored afterwards."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers, logger.level = handlers, level


def test_internal_errors_are_logged_with_the_request_id(
    client: TestClient, engine: FakeEngine, root: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure("json")
    engine.breaks_with = ZeroDivisionError("a mistake")
    client.post("/v1/completions", json={"prompt": "a", "stream": True}, headers={"x-request-id": "r-2"})
    client.post("/v1/completions", json={"prompt": "a", "stream": True, "request_id": "r-3"})
    lines = [json.loads(line) for line in capfd.readouterr().err.strip("\n").split("\n")]
    assert [line["request_id"] for line in lines if "a mistake" in line.get("exception", "")] == ["r-2", "r-3"]


def test_probes_stay_out_of_the_access_log() -> None:
    skip_paths("/health,/metrics")
    logger = logging.getLogger("uvicorn.access")

    def written(path: str, status: int) -> bool:
        args = ("1.2.3.4:5", "GET", path, "1.1", status)
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)
        return bool(logger.filter(record))

    assert not written("/health", 200)
    assert not written("/metrics?x=1", 200)
    assert not written("/health", 503)
    assert written("/v1/models", 200)
    skip_paths("")
    assert written("/health", 200)


@pytest.mark.parametrize("format", ["text", "json"])
def test_log_lines_of_a_rank_contain_its_number(
    root: logging.Logger, format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure(format, logging.WARNING, rank=3)
    logging.getLogger("stoker_engine.exec").info("said by another rank")
    logging.getLogger("stoker_engine.exec").warning("%d%% of memory", 97)
    logging.getLogger("httpx").info("GET a signed URL")
    (line,) = capfd.readouterr().err.rstrip("\n").split("\n")
    if format == "json":
        assert (json.loads(line)["rank"], json.loads(line)["message"]) == (3, "97% of memory")
    else:
        assert line.endswith(" warning stoker_engine.exec: 97% of memory [rank=3]")
