"""From parts of an answer to a response and its events, compared with OpenAI's SDK: its types, and how it accumulates a
response from a stream.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai import Stream, omit
from openai.lib.streaming.responses import ResponseStream
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from stoker_common.errors import EngineDeadError
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.server.fields.logprobs import ContentLogprob
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, merged, tool_call
from stoker_engine.server.responses.answer import InputTokensDetails, OutputTokensDetails, Response, ResponseUsage
from stoker_engine.server.responses.events import Event
from stoker_engine.server.responses.writer import ResponseWriter

from .conftest import FakeEngine, MakeClient
from .scripted_engine import ScriptedEngine
from .test_tools import serve

USAGE = ResponseUsage(
    input_tokens=1,
    input_tokens_details=InputTokensDetails(cached_tokens=0),
    output_tokens=2,
    output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
    total_tokens=3,
)
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def started() -> Response:
    return Response(
        id="resp_1",
        created_at=1,
        model="tiny",
        instructions=None,
        previous_response_id=None,
        store=False,
        max_output_tokens=None,
        max_tool_calls=None,
        temperature=1.0,
        top_p=1.0,
        top_logprobs=0,
        text={"format": {"type": "text"}},
        reasoning={"effort": None, "summary": None},
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        truncation="disabled",
        metadata={},
        user=None,
        safety_identifier=None,
        prompt_cache_key=None,
    )


def random_parts(rng: random.Random) -> list[Part]:
    """Return an answer: reasoning, texts and calls in random order."""
    parts: list[Part] = []
    for _ in range(rng.randint(0, 6)):
        text = "".join(rng.choices(["a", "é", "🦊", "\n", " ", '"', "\\", "\x00"], k=rng.randint(1, 5)))
        match rng.randrange(3):
            case 0:
                parts.append(Reasoning(text))
            case 1:
                parts.append(Content(text))
            case 2:
                call_id = rng.choice([None, f"id{rng.random()}"])
                parts += tool_call("f", json.dumps({"a": text}, ensure_ascii=False), call_id)
    return merged(parts)


def pieces(rng: random.Random, parts: list[Part]) -> Iterator[list[Part]]:
    """Yield the parts in steps, with texts split anywhere."""
    step: list[Part] = []
    for part in parts:
        remaining = getattr(part, "text", None)
        if remaining is None:
            step.append(part)
        while remaining:
            cut = rng.randint(1, len(remaining))
            step.append(replace(part, text=remaining[:cut]))
            remaining = remaining[cut:]
            if rng.random() < 0.5:
                yield step
                step = []
    yield step


def write(
    steps: list[list[Part]], logprobs: list[list[ContentLogprob]] | None = None, *, reason: FinishReason
) -> tuple[Response, list[Event]]:
    writer = ResponseWriter(started())
    events = writer.begin()
    for number, step in enumerate(steps):
        thinks = any(isinstance(part, Reasoning) for part in step)
        events += writer.add(step, logprobs[number] if logprobs else (), int(thinks))
    events += writer.end(reason, USAGE)
    return writer.response, [*events, *writer.last()]


def without_ids(response: Response) -> Any:
    """Return a response without ids and times."""
    written = response.model_dump(exclude={"completed_at"})
    for item in written["output"]:
        item.pop("id")
        if item.get("call_id", "").startswith("call_"):
            item.pop("call_id")
    return written


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_streamed_response_equals_the_whole_one(reason: FinishReason) -> None:
    rng = random.Random(2)
    for _ in range(80):
        parts = random_parts(rng)
        whole, _ = write([parts], reason=reason)
        streamed, events = write(list(pieces(rng, parts)), reason=reason)
        assert without_ids(streamed) == without_ids(whole)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = "".join(getattr(event, "delta", "") for event in events)
        assert deltas == "".join(getattr(part, "text", "") for part in parts), "all text arrives in order"
        for event in events:
            parsed = SDK_EVENT.validate_json(event.model_dump_json())
            assert parsed.type == event.type
        OpenAIResponse.model_validate_json(streamed.model_dump_json())


def test_openais_sdk_accumulates_the_same_response() -> None:
    rng = random.Random(3)
    for _ in range(40):
        parts = random_parts(rng)
        response, events = write(list(pieces(rng, parts)), reason=FinishReason.STOP)
        stream = ResponseStream(
            raw_stream=_Replayed(events),
            text_format=omit,
            input_tools=omit,
            starting_after=None,
        )
        final = stream.get_final_response()
        expected = json.loads(response.model_dump_json())["output"]
        got = json.loads(final.to_json())["output"]
        assert [item["id"] for item in got] == [item["id"] for item in expected]
        snapshot: Any = stream._state._output_items
        for number, item in enumerate(expected):
            if item["type"] == "message":
                assert snapshot[number].content[0].text == item["content"][0]["text"]
            if item["type"] == "function_call":
                assert snapshot[number].arguments == item["arguments"]


def test_events_of_each_item_come_in_order() -> None:
    parts = [Reasoning("hm"), Content("so"), *tool_call("f", "{}", "x"), *tool_call("g", '{"a": 1}')]
    _, events = write([parts], reason=FinishReason.STOP)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]
    assert {event.item.status for event in added} == {"in_progress"}
    created: Any = events[0]
    assert created.response.output == [], "later output does not change earlier events"
    assert created.response.status == "in_progress"


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([Reasoning("a")], ["incomplete"]),
        ([Reasoning("a"), Content("b")], ["completed", "incomplete"]),
        ([Content("b"), *tool_call("f", "{}")], ["completed", "incomplete"]),
        ([], []),
    ],
)
def test_a_limit_leaves_the_last_item_incomplete(parts: list[Part], statuses: list[str]) -> None:
    response, events = write([parts], reason=FinishReason.LENGTH)
    assert [item.status for item in response.output] == statuses
    assert events[-1].type == "response.incomplete"
    assert response.incomplete_details is not None


def test_empty_output_is_an_empty_message() -> None:
    silent: list[list[Part]] = [[], [Reasoning("hm")]]
    for parts in silent:
        response, _ = write([parts], reason=FinishReason.STOP)
        last = response.output[-1]
        assert last.type == "message"
        assert last.content[0].text == ""
    response, _ = write([tool_call("f", "{}")], reason=FinishReason.STOP)
    assert [item.type for item in response.output] == ["function_call"]


def logprob(token: str) -> ContentLogprob:
    return ContentLogprob(token=token, logprob=-1.0, bytes=list(token.encode()), top_logprobs=[])


def test_logprobs_belong_to_the_output_text() -> None:
    steps: list[list[Part]] = [[Reasoning("r")], [], [Content("ab")], [], [Content("c")], []]
    logprobs = [[logprob(token)] for token in ("r", "a", "b", "c1", "c2", "end")]
    response, events = write(steps, logprobs, reason=FinishReason.STOP)
    text: Any = response.output[1]
    assert [each.token for each in text.content[0].logprobs] == ["a", "b", "c1", "c2", "end"]
    deltas = [each.token for event in events for each in getattr(event, "logprobs", []) if "delta" in event.type]
    assert deltas == ["a", "b", "c1", "c2", "end"]


@pytest.mark.parametrize("text", ["ab</think>hello", "<think>ab</think>\n\nhello", "ab"])
def test_logprobs_cover_the_answer_however_deltas_are_split(text: str) -> None:
    expected = text.partition("</think>")[2]
    for piece in range(1, len(text) + 2):
        client = serve(ScriptedEngine(text, piece=piece), reasoning_parser="deepseek_r1")
        body = {"input": "hi", "include": ["message.output_text.logprobs"]}
        message = client.post("/v1/responses", json=body).json()["output"][-1]
        tokens = [each["token"] for part in message["content"] for each in part.get("logprobs", [])]
        assert "".join(tokens) == expected, piece


def test_an_engine_error_fails_the_response(client: TestClient, engine: FakeEngine) -> None:
    engine.breaks_with = EngineDeadError("it broke")
    whole = client.post("/v1/responses", json={"input": "hi"})
    assert whole.status_code == 500
    events = streamed(client, input="hi")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert last["response"]["output"][0]["content"][0]["text"] == "hel", "the text so far is kept"
    assert last["response"]["output"][0]["status"] == "incomplete"
    for event in events:
        SDK_EVENT.validate_python(event)
    assert client.get(f"/v1/responses/{last['response']['id']}").status_code == 404


def test_an_engine_error_before_the_first_event_sets_the_status(client: TestClient, engine: FakeEngine) -> None:
    engine.error = EngineDeadError("it is gone")
    for stream in (False, True):
        answer = client.post("/v1/responses", json={"input": "hi", "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "it is gone"


CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls_are_separate_items(make_client: MakeClient, engine: FakeEngine, stream: bool) -> None:
    engine.info = replace(engine.info, max_model_len=4096)
    engine.answer = f"<think>hm, é</think>I ask.{CALL_TEXT}"
    client = make_client(tool_call_parser="hermes", reasoning_parser="qwen3")
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    if stream:
        answer = streamed(client, input="hi", tools=tools)[-1]["response"]
    else:
        answer = client.post("/v1/responses", json={"input": "hi", "tools": tools}).json()
    thought, message, call = answer["output"]
    assert thought["content"][0]["text"] == "hm, é"
    assert message["content"][0]["text"] == "I ask."
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": [1, "é"]})
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]
    hidden = client.post("/v1/responses", json={"input": "hi", "tools": tools, "include_reasoning": False}).json()
    assert [item["type"] for item in hidden["output"]] == ["message", "function_call"]
    assert hidden["usage"] == answer["usage"], "hidden reasoning counts too"
    engine.answer = "done"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    body = {"input": [result], "tools": tools, "previous_response_id": answer["id"]}
    assert client.post("/v1/responses", json=body).status_code == 200
    _, assistant, tool = engine.tokenizer.rendered["messages"]
    assert assistant["content"] == "I ask."
    assert assistant["reasoning"] == "hm, é"
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1, "é"]}}
    assert tool == {"role": "tool", "content": "5", "tool_call_id": call["call_id"]}


def test_lone_surrogates_in_arguments_are_accepted(make_client: MakeClient, engine: FakeEngine) -> None:
    """They are returned unchanged, and replaced when the conversation continues."""
    engine.info = replace(engine.info, max_model_len=4096)
    arguments = '{"a": "\\ud800"}'
    engine.answer = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    client = make_client(tool_call_parser="hermes")
    tools = [{"type": "function", "name": "f"}]
    answer = client.post("/v1/responses", json={"input": "hi", "tools": tools})
    assert answer.json()["output"][0]["arguments"] == arguments
    assert streamed(client, input="hi", tools=tools)[-1]["type"] == "response.completed"
    body = {"input": "and?", "previous_response_id": answer.json()["id"]}
    assert client.post("/v1/responses", json=body).status_code == 200
    assert engine.tokenizer.rendered["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": "\ufffd"}
    assert client.get(f"/v1/responses/{answer.json()['id']}/input_items").status_code == 200


@pytest.mark.parametrize("piece", [1, 100])
def test_a_call_cut_by_a_stop_string_is_incomplete(piece: int) -> None:
    body = {
        "input": "hi",
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "function", "name": "f"},
    }
    cut, whole = '{"a": "Os', '{"a": "Oslo"}'
    client = serve(ScriptedEngine(cut, whole, cut, piece=piece), tool_call_parser="hermes")
    for message, status in ((cut, "incomplete"), (whole, "completed")):
        answer = OpenAIResponse.model_validate(client.post("/v1/responses", json=body).json())
        assert answer.status == status
        [call] = answer.output
        assert (call.status, call.to_dict()["arguments"]) == (status, message)
    assert streamed(client, **body)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("limit", [1, 6, 7, 13])
def test_a_conversation_continues_after_a_truncated_call(
    make_client: MakeClient, engine: FakeEngine, limit: int, by_id: bool
) -> None:
    """The model gets its own incomplete call as part of the prompt."""
    engine.info = replace(engine.info, max_model_len=4096)
    engine.answer = '{"a": 1, "b": "xyz"}'[:limit]
    client = make_client(tool_call_parser="hermes")
    tools = [{"type": "function", "name": "f"}]
    choice = {"type": "function", "name": "f"}
    body = {"input": "hi", "tools": tools, "tool_choice": choice, "max_output_tokens": limit}
    answer = client.post("/v1/responses", json=body).json()
    [call] = answer["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", engine.answer)
    question = [{"role": "user", "content": "and?"}]
    continued = {"previous_response_id": answer["id"]} if by_id else {}
    again = client.post("/v1/responses", json={"input": question if by_id else [call, *question], **continued})
    assert again.status_code == 200, again.text
    deltas = engine.tokenizer.rendered["messages"][-2]["tool_calls"][0]["function"]["arguments"]
    assert deltas == engine.answer
    assert client.get(f"/v1/responses/{answer['id']}").json()["output"] == [call]


def streamed(client: TestClient, **body: Any) -> list[Any]:
    """Return the events of a stream; check that its lines name their types."""
    answer = client.post("/v1/responses", json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


class _Replayed(Stream[Any]):
    """A stream of given events."""

    def __init__(self, events: list[Event]) -> None:
        self.response = None  # type: ignore[assignment]
        self._events = [SDK_EVENT.validate_json(event.model_dump_json()) for event in events]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._events)
