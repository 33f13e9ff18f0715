"""``X-Stoker-Usage: 1``: a stream's events contain the current usage, so that an interrupted stream has its count."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from .conftest import FakeEngine, MakeClient

MESSAGES = [{"role": "user", "content": "abc"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "abc"},
    "/v1/responses": {"input": "abc"},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 100},
}


def streamed(client: TestClient, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """Return the events without their times."""
    headers = {"x-request-id": "one", **headers}
    answer = client.post(path, json={**BODIES[path], **body, "stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    for event in events:
        for name in ("created", "created_at", "completed_at"):
            event.pop(name, None)
            event.get("response", {}).pop(name, None)
    return events


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [{}, {"n": 3}, {"stream_options": {"include_usage": True}}])
def test_the_header_adds_usage_to_the_same_events(client: TestClient, path: str, body: dict[str, Any]) -> None:
    if body and path not in ("/v1/chat/completions", "/v1/completions"):
        pytest.skip("this API has one answer, which always contains its usage")
    plain = streamed(client, path, body)
    for value in ("0", "yes", ""):
        assert "stoker_usage" not in str(streamed(client, path, body, **{"X-Stoker-Usage": value}))
    counted = streamed(client, path, body, **{"X-Stoker-Usage": "1"})
    usages = [event.pop("stoker_usage") for event in counted if "stoker_usage" in event]
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert counted == plain
    else:  # ids of items differ between responses
        assert [event["type"] for event in counted] == [event["type"] for event in plain]
    whole = client.post(path, json={**BODIES[path], "n": body["n"]} if "n" in body else BODIES[path]).json()
    usage = whole["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0))
    output = usage.get("completion_tokens", usage.get("output_tokens"))
    assert (usages[-1]["prompt_tokens"], usages[-1]["completion_tokens"]) == (prompt, output)
    assert [each["prompt_tokens"] for each in usages] == [usages[0]["prompt_tokens"]] * len(usages)
    outputs = [each["completion_tokens"] for each in usages]
    assert outputs == sorted(outputs) and len(set(outputs)) > 3


def test_an_events_usage_counts_the_tokens_up_to_it(engine: FakeEngine, client: TestClient) -> None:
    num_characters = 0
    for event in streamed(client, "/v1/completions", {"n": 2}, **{"X-Stoker-Usage": "1"}):
        num_characters += sum(len(choice["text"]) for choice in event["choices"])
        if "stoker_usage" in event:
            assert (
                num_characters <= event["stoker_usage"]["completion_tokens"] <= num_characters + 2
            )  # each ends with a token without text


def test_cached_tokens_are_included_only_with_prompt_tokens_details(make_client: MakeClient) -> None:
    for include_usage in (True, False):
        client = make_client(enable_prompt_tokens_details=include_usage)
        events = streamed(client, "/v1/completions", {}, **{"X-Stoker-Usage": "1"})
        assert ("cached_tokens" in events[-1]["stoker_usage"]) is include_usage
