"""Responses to probes are true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from stoker_engine.contract.engine_state import EngineState
from stoker_engine.server.app import create_app
from stoker_engine.server.unavailable import UnavailableError

from ...support.virtual_time import now
from .conftest import FakeEngine, MakeService

PROBES = ("/live", "/health", "/ready", "/ping")


def _statuses(client: TestClient) -> list[int]:
    return [client.get(path).status_code for path in PROBES]


def test_probes_are_200_while_the_engine_serves(client: TestClient) -> None:
    assert _statuses(client) == [200] * 4
    assert client.post("/ping").status_code == 200
    for path in PROBES[:3]:
        assert client.head(path).status_code == 200
    assert client.get("/version").json()["version"]


def test_only_live_is_200_while_the_model_loads(client: TestClient, engine: FakeEngine) -> None:
    engine.is_ready, engine.status = False, "loading: reading weights"
    assert _statuses(client) == [200, 503, 503, 503]
    error = client.get("/health").json()["error"]
    assert error["message"] == "loading: reading weights"
    assert error["type"] == "service_unavailable_error"


def test_probes_are_503_if_the_engine_is_dead_or_stuck(client: TestClient, engine: FakeEngine) -> None:
    engine.is_ready = engine.is_live = False
    assert _statuses(client) == [503] * 4


def test_only_ready_is_503_during_shutdown(make_service: MakeService) -> None:
    service = make_service()
    service.lifecycle.leaving = True
    assert _statuses(TestClient(create_app(service))) == [200, 200, 503, 200]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_requests_get_503_with_retry_after_while_the_model_loads(
    client: TestClient, engine: FakeEngine, path: str
) -> None:
    engine.is_ready = False
    body = (
        {"prompt": "a"}
        if path in ("/v1/completions", "/tokenize")
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    if path == "/detokenize":
        body = {"tokens": [1]}
    response = client.post(path, json=body)
    assert response.status_code == 503
    assert response.headers["connection"] == "close", "a kept connection would lead the next request to this server too"
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["type"] == "service_unavailable_error"
    assert client.get("/v1/models").status_code == 503
    assert not engine.requests_seen


@pytest.mark.parametrize("stuck", [True, False])
def test_requests_wait_for_a_dead_engine_but_not_for_a_stuck_one(
    make_service: MakeService, engine: FakeEngine, virtual_time: Any, stuck: bool
) -> None:
    """A stuck engine may never end, so it may never be restarted."""
    service = make_service(max_engine_restarts=3)
    engine.is_ready, engine.is_stuck = False, stuck

    async def main() -> None:
        with pytest.raises(UnavailableError):
            await service.wait_ready()
        assert (now() == 0) == stuck

    virtual_time(main)


def test_an_engine_that_dies_during_tokenization_gets_no_request(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = engine.tokenizer.encode

    async def dying(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        engine.is_ready = False
        return await encode(texts, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", dying)
    refused = client.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.headers["x-stoker-not-begun"]) == (503, "1")
    assert not engine.requests_seen


def test_http_metrics_have_the_instrumentators_names(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "a"})
    client.post("/v1/completions", json={"prompt": 5})
    client.get("/nowhere")
    client.get("/health")
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    reported = {
        (s.labels["method"], s.labels["status"], s.labels["handler"]): s.value
        for s in families["http_requests"].samples
        if s.name == "http_requests_total"
    }
    assert reported == {
        ("POST", "2xx", "/v1/completions"): 1,
        ("POST", "4xx", "/v1/completions"): 1,
        ("GET", "4xx", "none"): 1,
    }, "probes are not counted"
    assert families["http_request_duration_seconds"].type == "histogram"
    assert families["http_request_duration_highr_seconds"].type == "histogram"
    assert families["http_request_size_bytes"].type == "summary"
    assert families["http_response_size_bytes"].type == "summary"


def test_engine_states_are_reported_even_if_no_engine_serves(client: TestClient, engine: FakeEngine) -> None:
    engine.is_ready = engine.is_live = False
    lost = EngineState(0, False, 4, (2, 3), "loading: reading the model")
    engine.engine_states = [lost, EngineState(1, True, 4, (), "serving", 7, 112)]
    answer = client.get("/copies")
    assert answer.status_code == 200
    assert [EngineState.from_dict(each) for each in answer.json()] == engine.engine_states
