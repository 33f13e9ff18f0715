"""response_format and structured_outputs over HTTP, on the real engine with a tiny model: complete output is valid."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import pydantic
import pytest
from openai import OpenAI
from openai.lib._parsing import type_to_response_format_param
from starlette.testclient import TestClient

from stoker_engine.cli.lines import lines_of

from ..grammar.malformed_grammars import constraints
from .conftest import FakeEngine

MESSAGES: Any = [{"role": "user", "content": "the quick fox"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["fox", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
HOT: dict[str, Any] = {"temperature": 1.5, "max_tokens": 300, "seed": 5}
#: Constraints, each with a check of the output.
CONSTRAINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format json_schema": ({"response_format": FORMAT}, lambda text: valid(text)),
    "json": ({"structured_outputs": {"json": SCHEMA}}, lambda text: valid(text)),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, lambda text: valid(text)),
    "both": (
        {"response_format": FORMAT, "structured_outputs": {"disable_any_whitespace": True}},
        lambda text: valid(text) and text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False),
    ),
    "a false json_object": (
        {"response_format": FORMAT, "structured_outputs": {"json_object": False}},
        lambda text: valid(text),
    ),
    "regex": ({"structured_outputs": {"regex": r"[a-f]{3}-\d"}}, lambda text: re.fullmatch(r"[a-f]{3}-\d", text)),
    "choice": ({"structured_outputs": {"choice": ["fox", "dög"]}}, lambda text: text in ("fox", "dög")),
    "grammar": (
        {"structured_outputs": {"grammar": 'root ::= "a" [0-9] | "b"'}},
        lambda text: re.fullmatch("a[0-9]|b", text),
    ),
    "structural tag": (
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "fox!"}}},
        lambda text: text == "fox!",
    ),
}


def valid(text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text, strict=True)))


@pytest.fixture(scope="module")
def http(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, timeout=60)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_satisfy_the_constraint(http: httpx.Client, path: str, constraint: str) -> None:
    fields, keeps = CONSTRAINTS[constraint]
    prompt_fields = {"prompt": "the quick fox"} if path == "/v1/completions" else {"messages": MESSAGES}
    answer = http.post(path, json={**prompt_fields, **fields, **HOT, "n": 3}).json()
    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    for choice, text in zip(answer["choices"], texts, strict=True):
        assert choice["finish_reason"] == "stop", text
        assert keeps(text), text
    with http.stream("POST", path, json={**prompt_fields, **fields, **HOT, "n": 3, "stream": True}) as stream:
        assert stream.status_code == 200
        lines = [line.removeprefix("data: ") for line in lines_of(stream.iter_bytes()) if line]
    streamed = [""] * 3
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            streamed[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    assert streamed == texts


HOT_SDK: Any = {"temperature": 1.0, "max_tokens": 400}


class Animal(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)
    kind: Literal["fox", "dog"]
    friend: Animal | None = None
    ages: list[int] = pydantic.Field(max_length=2)


def test_openais_client_parses_into_models(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    answers = (
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=type_to_response_format_param(Animal), seed=seed, **HOT_SDK
        )
        for seed in range(20)
    )
    # Friends may have friends, and so on.
    seed = next(seed for seed, answer in enumerate(answers) if answer.choices[0].finish_reason == "stop")
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Animal, seed=seed, **HOT_SDK
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Animal)
    loose = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, seed=1, max_tokens=20
    )
    assert (loose.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {**FORMAT, "type": "text"}}, "response_format", "require each other"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema", "required"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "unknown"),
        ({"response_format": {"type": "structural_tag", "triggers": []}}, "response_format", "structures"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format", "'x'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "does not ask for"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}, "response_format": {"type": "text"}},
            "structured_outputs",
            "whitespace_pattern is an option",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", ""),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "string"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", ""),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": ".*"}}, "structured_outputs.whitespace_pattern", ""),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, None, "JSON"),
        ({"structured_outputs": {"_backend": "outlines", "regex": "a"}}, "structured_outputs._backend", "unknown"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs", "one of them"),
        ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "structured_outputs", "beam"),
        ({"response_format": FORMAT, "use_beam_search": True, "n": 2}, "response_format", "beam"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}, "allowed_token_ids", "structured_outputs"),
        ({"response_format": FORMAT, "allowed_token_ids": [5]}, "allowed_token_ids", "response_format"),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", ""),
    ],
)
@pytest.mark.parametrize(("path", "stream"), [("/v1/completions", False), ("/v1/chat/completions", True)])
def test_refusals_name_the_field(
    http: httpx.Client, path: str, stream: bool, fields: dict[str, Any], param: str | None, word: str
) -> None:
    prompt_fields = {"prompt": "fox"} if path == "/v1/completions" else {"messages": MESSAGES}
    response = http.post(path, json={**prompt_fields, **fields, "stream": stream, "max_tokens": 5})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"].endswith(param)
    assert word in error["message"]


def test_null_sets_no_constraint(client: TestClient, engine: FakeEngine) -> None:
    nothing = {"response_format": None, "structured_outputs": None, "guided_json": None}
    for fields in (nothing, {"response_format": {"type": "text"}}):
        assert client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a", **fields}).status_code == 200


def test_malformed_constraints_are_refused_or_served(http: httpx.Client) -> None:
    for constraint in constraints(seed=3, count=25):
        try:
            body = json.dumps({"prompt": "fox", "structured_outputs": constraint, "max_tokens": 3, "seed": 1})
        except ValueError:
            continue
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), (constraint, response.text)
    assert http.post("/v1/completions", json={"prompt": "fox", "max_tokens": 3}).status_code == 200
