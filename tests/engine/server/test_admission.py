"""Backpressure: which requests are refused, what is counted, and that all of it is released."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from stoker_common.errors import OverloadedError
from stoker_engine.server.app import create_app
from stoker_engine.server.engine.admission import Admission

from ...support.waiting import until_async
from .conftest import FakeEngine, MakeClient, MakeService
from .test_errors import error_of


def _rejections(client: TestClient) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if "admission_rejections_total{" in line]
    return {line.partition('reason="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


def test_requests_above_the_sequence_limit_are_refused(make_client: MakeClient) -> None:
    client = make_client(max_num_queued_reqs=4)
    assert client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2}).status_code == 200
    for body in ({"prompt": "a", "n": 5}, {"prompt": ["a", "b", "c"], "n": 2}, {"prompt": ["a"] * 5, "stream": True}):
        response = client.post("/v1/completions", json=body)
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
    assert _rejections(client) == {"max_num_queued_reqs": 3, "max_num_queued_tokens": 0}
    assert client.post("/v1/completions", json={"prompt": "a", "n": 4}).status_code == 200, "all permits were returned"


def test_prompt_tokens_count_until_the_first_token() -> None:
    rejected: list[str] = []
    admission = Admission(None, 10, rejected.append)
    long = admission.admit([30], 1)  # longer than the limit, and alone
    with pytest.raises(OverloadedError):
        admission.admit([1], 1)
    admission.on_first_token(long, 0)
    admission.on_first_token(long, 0)
    two = admission.admit([4, 5], 2)
    one = admission.admit([6], 1)
    assert admission.num_waiting_tokens == 15
    admission.on_first_token(two, 1)
    for ticket in (two, one, long, two):
        admission.release(ticket)
    assert (admission.num_sequences, admission.num_waiting_tokens) == (0, 0)
    assert rejected == ["max_num_queued_tokens"]


def test_concurrent_requests_above_the_limit_are_refused(make_service: MakeService, engine: FakeEngine) -> None:
    """Twenty concurrent requests on a server for five: five are served, and disconnected ones release their slots."""
    engine.hangs_at = 0
    app = create_app(make_service(max_num_queued_reqs=5))

    async def run() -> list[int]:
        async with _client(app) as client:
            requests = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"})) for _ in range(20)]
            await until_async(lambda: len(engine.alive) >= 5 and sum(task.done() for task in requests) >= 15)
            assert (await client.get("/load")).json() == {"server_load": 5}
            statuses = [task.result().status_code for task in requests if task.done()]
            for task in requests:
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            engine.hangs_at = None
            statuses.append((await client.post("/v1/completions", json={"prompt": ["a"] * 5})).status_code)
            assert (await client.get("/load")).json() == {"server_load": 0}
            return statuses

    assert asyncio.run(asyncio.wait_for(run(), 120)) == [429] * 15 + [200]


@contextlib.asynccontextmanager
async def _client(app: FastAPI) -> Any:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
