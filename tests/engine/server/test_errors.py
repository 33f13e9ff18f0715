"""Every error has OpenAI's format, and affects a single request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from stoker_common.errors import EngineDeadError, RequestError

from ...support import golden
from .conftest import FakeEngine, MakeClient

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error of a response; check its format."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b'"prompt"',
        b"{'prompt': 'a'}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        '{"prompt": "a"}'.encode("utf-16"),
    ],
)
def test_bodies_that_are_no_json_object_are_refused(client: TestClient, body: bytes) -> None:
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["type"] == "invalid_request_error"


def test_a_body_of_another_content_type_is_refused(client: TestClient) -> None:
    response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert "application/json" in error_of(response, 400)["message"]


def test_unknown_models_are_404(client: TestClient) -> None:
    for response in (
        client.post("/v1/completions", json={"prompt": "a", "model": "gpt"}),
        client.post("/v1/chat/completions", json={**CHAT, "model": "gpt"}),
        client.get("/v1/models/gpt"),
    ):
        error = error_of(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "tiny" in error["message"], "the error names the served model"


def test_unknown_paths_are_404_and_methods_405(client: TestClient) -> None:
    error_of(client.get("/nowhere"), 404)
    error_of(client.post("/v1/completions/"), 404)
    response = client.get("/v1/completions")
    assert error_of(response, 405)["message"] == "this path does not support this HTTP method; it supports POST"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("root_path", ["", "/llm"])
@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "use /v1/chat/completions: the client's base URL lacks /v1"),
        ("/completions/", "use /v1/completions: the client's base URL lacks /v1"),
        ("/models", "use /v1/models: the client's base URL lacks /v1"),
        ("/models/tiny", "use /v1/models/tiny: the client's base URL lacks /v1"),
        ("/responses", "use /v1/responses: the client's base URL lacks /v1"),
        ("/messages", "use /v1/messages: the client's base URL lacks /v1"),
        ("/v1/v1/messages", "use /v1/messages: the client adds /v1 to a base URL that already ends with it"),
        ("/v1/completions/", "use /v1/completions"),
        ("/embeddings", "GET /openapi.json lists them"),
        ("/v1/embeddings", "GET /openapi.json lists them"),
        ("/v1" * 3 + "/models", "GET /openapi.json lists them"),
        ("/", "GET /openapi.json lists them"),
    ],
)
def test_errors_of_unknown_paths_name_the_right_one(
    make_client: MakeClient, path: str, remedy: str, root_path: str
) -> None:
    client = make_client(root_path=root_path)
    for response in (client.post(root_path + path, json=CHAT), client.get(root_path + path)):
        error = error_of(response, 404)
        assert error["type"] == "not_found_error"
        assert error["message"] == f"there is no such path; {remedy.replace('use ', f'use {root_path}', 1)}"


def test_errors_of_unknown_paths_do_not_name_a_schema_that_is_not_served(make_client: MakeClient) -> None:
    error = error_of(make_client(disable_fastapi_docs=True).get("/openapi.json"), 404)
    assert error["message"] == "there is no such path"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_are_400(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/chat/completions", CHAT, "messages"),
    ):
        engine.error = RequestError("too long", "prompt", "context_length_exceeded")
        error = error_of(client.post(path, json={**body, "stream": stream}), 400)
        assert (error["message"], error["param"], error["code"]) == ("too long", param, "context_length_exceeded")


def test_errors_name_the_limit_field_that_the_client_used(client: TestClient, engine: FakeEngine) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        engine.error = RequestError("too many", "max_tokens")
        response = client.post("/v1/chat/completions", json={**CHAT, name: 60})
        assert error_of(response, 400)["param"] == name


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_refuses_the_request_and_ends_the_others(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    error_of(client.post("/v1/completions", json={"prompt": [[1], [], [2]], "stream": stream}), 400)
    assert not engine.alive


def test_refusals_of_the_tokenizer_are_400(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "no template"}], "stream": True}
    assert error_of(client.post("/v1/chat/completions", json=body), 400)["param"] == "messages"


@pytest.mark.parametrize("mistake", [EngineDeadError("the engine has stopped"), ZeroDivisionError("secret")])
def test_internal_errors_are_500(client: TestClient, engine: FakeEngine, mistake: Exception) -> None:
    engine.breaks_with = mistake
    response = client.post("/v1/completions", json={"prompt": "a"})
    assert error_of(response, 500)["type"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("mistake", [EngineDeadError("the engine has stopped"), ZeroDivisionError("secret")])
def test_a_broken_stream_ends_with_an_error(client: TestClient, engine: FakeEngine, mistake: Exception) -> None:
    engine.breaks_with = mistake
    for path, body in (("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/chat/completions", CHAT)):
        response = client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, "the stream had started"
        *started, last, rest = response.text.split("\n\n")
        assert started
        assert rest == ""
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "internal_error"
        assert "[DONE]" not in response.text
        assert "secret" not in response.text
        assert not engine.alive


def test_the_schema_documents_errors_as_they_are(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    responses = schema["paths"]["/v1/completions"]["post"]["responses"]
    assert "422" not in responses
    assert responses["4XX"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}


def test_golden_openapi(make_client: MakeClient) -> None:
    """Paths, operation ids, fields and their bounds of a server with adapters; descriptions may change."""
    client = make_client(engine_args={"enable_lora": True})

    def without_prose(node: Any) -> Any:
        if isinstance(node, list):
            return [without_prose(each) for each in node]
        if not isinstance(node, dict):
            return node
        prose = {name for name in ("description", "title", "summary") if isinstance(node.get(name), str)}
        return {name: without_prose(value) for name, value in node.items() if name not in prose}

    schema = without_prose(client.get("/openapi.json").json())
    golden.check("openapi.json", json.dumps(schema, indent=1, sort_keys=True) + "\n")
