"""/v1/messages with Anthropic's client: a scripted engine writes typical output, sockets are real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool, transform_schema
from pydantic import BaseModel

from stoker_common.errors import RequestFailedError
from stoker_engine.server.app import create_app

from ...support.waiting import until_async
from .conftest import FakeEngine, Listen, MakeService, wait_until

HELLO: Any = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
WITH_TOOLS: Any = {**HELLO, "tools": [WEATHER]}


def call(city: str) -> str:
    """Return a call in Hermes' format."""
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


class ScriptedEngine(FakeEngine):
    """Generates the lines of its script one after another, then repeats the last one.

    Attributes:
        stopped_by: stop string that ends each output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, max_model_len=4096)
        self.script: list[str] = []
        self.stopped_by: str | None = None

    async def add_request(self, *args: Any, **kwargs: Any) -> int:
        if self.script:
            self.answer = self.script.pop(0)
        return await super().add_request(*args, **kwargs)

    def _delta(self, *args: Any) -> Any:
        delta = super()._delta(*args)
        return delta if delta.finish_reason is None else replace(delta, stop_reason=self.stopped_by)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


Serve = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def serve(make_service: MakeService, listen: Listen) -> Serve:
    """Serve the scripted engine with these flags."""

    @contextmanager
    def serve(**frontend: Any) -> Iterator[str]:
        with listen(create_app(make_service(**{"tool_call_parser": "hermes", **frontend}))) as (host, port):
            yield f"http://{host}:{port}"

    return serve


@pytest.fixture
def url(serve: Serve, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a server with the arguments of a parametrized test."""
    with serve(**getattr(request, "param", {})) as url:
        yield url


#: For a model that reasons until it writes `</think>`.
thinking = pytest.mark.parametrize("url", [{"reasoning_parser": "qwen3"}], indirect=True)


@pytest.fixture
def client(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def without_ids(message: Any) -> dict[str, Any]:
    """Return a message without generated ids."""
    data: dict[str, Any] = message.to_dict(exclude_none=True)
    return {**data, "id": "", "content": [{**block, "id": ""} for block in data["content"]]}


def test_messages_have_anthropics_format(client: Anthropic, engine: ScriptedEngine) -> None:
    message = client.messages.create(
        **HELLO, system="be brief", extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    )
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hello world"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    prompt, params = engine.requests_seen[0]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (len(prompt) - 2, 2, 11)
    assert usage.cache_creation_input_tokens == 0
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 500)
    roles = [(message["role"], message["content"]) for message in engine.tokenizer.rendered["messages"]]
    assert roles == [("system", "be brief"), ("user", "hi")]


def test_cached_tokens_are_omitted_without_prompt_tokens_details(serve: Serve) -> None:
    with serve(enable_prompt_tokens_details=False) as url:
        usage = httpx.post(f"{url}/v1/messages", json=HELLO).json()["usage"]
    assert set(usage) == {"input_tokens", "output_tokens"}


@thinking
def test_stream_events_come_in_anthropics_order(url: str, engine: ScriptedEngine) -> None:
    engine.script = [f"<think>so</think>\n\nok {call('Oslo')}"]
    answer = httpx.post(f"{url}/v1/messages", json={**WITH_TOOLS, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    names = [event.splitlines()[0].removeprefix("event: ") for event in events]
    data = [json.loads(event.strip("\n").split("\n")[1].removeprefix("data: ")) for event in events]
    assert names == [each["type"] for each in data]
    assert names[:2] == ["message_start", "ping"]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert names[-2:] == ["message_delta", "message_stop"]
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert data[-2]["usage"]["output_tokens"] == len(engine.answer)
    blocks = [
        (each["index"], each.get("content_block", each.get("delta", {})).get("type", "stop")) for each in data[2:-2]
    ]
    shape = list(dict.fromkeys(blocks))
    assert shape == [
        (0, "thinking"), (0, "thinking_delta"), (0, "signature_delta"), (0, "stop"),
        (1, "text"), (1, "text_delta"), (1, "stop"),
        (2, "tool_use"), (2, "input_json_delta"), (2, "stop"),
    ]  # fmt: skip
    assert blocks == sorted(blocks, key=shape.index), "one block at a time"


ANSWERS = [
    "</think>hello",
    "<think>first\nthis</think>\n\nThe answer is é🦊.",
    "<think>never ends",
    f"</think>{call('Oslo')}",
    f"</think>Let me see. {call('Oslo')}\n{call('Bergen')}",
    f"<think>which?</think>\n\n{call('Oslo')} and then",
    '</think><tool_call>\n{"name": "weather", "arguments": {"city": ',
    "</think><tool_call>not a call</tool_call> after",
]


@thinking
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_streamed_message_equals_the_whole_one(client: Anthropic, engine: ScriptedEngine, display: str) -> None:
    request: Any = {**WITH_TOOLS, "thinking": {"type": "adaptive", "display": display}}
    for answer in ANSWERS:
        engine.script = [answer] * 2
        whole = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
        assert without_ids(streamed) == without_ids(whole)
        assert events[-1].type == "message_stop"
        text = "".join(block.text for block in whole.content if block.type == "text")
        assert "".join(event.text for event in events if event.type == "text") == text
        thoughts = "".join(block.thinking for block in whole.content if block.type == "thinking")
        assert (thoughts == "") == (display == "omitted" or answer.startswith("</think>"))
        for word in ("first\nthis", "é🦊", "never ends", "Let me see.", "not a call", "after"):
            hidden = display == "omitted" and word in ("first\nthis", "never ends")
            assert (word in thoughts + text) == (word in answer and not hidden)
        calls = [block.input for block in whole.content if block.type == "tool_use"]
        assert calls == [{"city": city} for city in ("Oslo", "Bergen") if call(city) in answer]
        assert whole.stop_reason == ("tool_use" if calls else "end_turn")


def test_a_stop_sequence_is_named(client: Anthropic, engine: ScriptedEngine) -> None:
    engine.stopped_by = "END"
    request: Any = {**HELLO, "stop_sequences": ["END", "FIN"]}
    message = client.messages.create(**request)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert engine.requests_seen[0][1].stop == ("END", "FIN")
    with client.messages.stream(**request) as stream:
        assert stream.get_final_message().stop_sequence == "END"
    engine.script = [call("Oslo")]
    message = client.messages.create(**{**WITH_TOOLS, "stop_sequences": ["END"]})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None), (
        "the call is complete, and expects a result"
    )


def test_stop_reason_names_the_limit(client: Anthropic, engine: ScriptedEngine) -> None:
    assert client.messages.create(**{**HELLO, "max_tokens": 4}).stop_reason == "max_tokens"
    engine.info = replace(engine.info, max_model_len=20)
    message = client.messages.create(**{**HELLO, "max_tokens": 64_000})
    assert engine.requests_seen[-1][1].max_tokens == 20 - len(engine.requests_seen[-1][0])
    assert message.stop_reason == "end_turn"
    engine.answer = "a" * 100
    message = client.messages.create(**{**HELLO, "max_tokens": 64_000})
    assert message.stop_reason == "model_context_window_exceeded"
    with pytest.raises(anthropic.BadRequestError, match=r"messages: .*maximum context length"):
        client.messages.create(**{**HELLO, "max_tokens": 1, "messages": [{"role": "user", "content": "a" * 14}]})


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"city": "\\ud83d"}', {"city": "\ufffd"}), (f'{{"city": {"[" * 197 + "]" * 197}}}', None)],
    ids=["lone surrogate", "deep nesting"],
)
def test_calls_with_unusual_json_are_still_calls(
    url: str, engine: ScriptedEngine, arguments: str, read: Any, forced: bool
) -> None:
    """The whole message contains the valid part of the JSON, the stream contains the model's text."""
    answer_text = arguments if forced else f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    engine.script = [answer_text] * 2
    request = {**WITH_TOOLS, "tool_choice": {"type": "tool", "name": "weather"}} if forced else WITH_TOOLS
    whole = httpx.post(f"{url}/v1/messages", json=request).json()
    [block] = whole["content"]
    assert block["input"] == (json.loads(arguments) if read is None else read)
    lines = httpx.post(f"{url}/v1/messages", json={**request, "stream": True}).text.strip("\n").split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == arguments
    [ended] = [event for event in events if event["type"] == "message_delta"]
    assert whole["stop_reason"] == ended["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("forced", [True, False])
def test_too_deeply_nested_arguments_are_no_call(client: Anthropic, engine: ScriptedEngine, forced: bool) -> None:
    arguments = f'{{"city": {"[" * 230 + "]" * 230}}}'
    engine.answer = arguments if forced else f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    choice: Any = {"tool_choice": {"type": "tool", "name": "weather"}} if forced else {}
    message = client.messages.create(**{**WITH_TOOLS, "max_tokens": 900}, **choice)
    assert message.stop_reason == "end_turn"
    if not forced:
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": engine.answer}]


@thinking
def test_the_sdk_runs_tools_until_the_model_answers(client: Anthropic, engine: ScriptedEngine) -> None:
    """Like users of the SDK: its runner calls the function and sends the next request."""

    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return f"rain in {city}"

    engine.script = [f"<think>look</think>\n\nI look.{call('Oslo')}{call('Bergen')}", "</think>It rains."]
    runner = client.beta.messages.tool_runner(**HELLO, tools=[weather])
    final = runner.until_done()
    assert [block.to_dict() for block in final.content] == [{"type": "text", "text": "It rains."}]
    rendered = engine.tokenizer.rendered
    assert rendered["tools"][0]["function"]["name"] == "weather"
    _, request, *results = rendered["messages"]
    assert (request["role"], request["content"], request["reasoning"]) == ("assistant", "\n\nI look.", "look")
    assert [each["function"]["arguments"] for each in request["tool_calls"]] == [{"city": "Oslo"}, {"city": "Bergen"}]
    assert [(each["role"], each["content"]) for each in results] == [
        ("tool", "rain in Oslo"),
        ("tool", "rain in Bergen"),
    ]
    assert [each["tool_call_id"] for each in results] == [each["id"] for each in request["tool_calls"]]


def test_counted_tokens_equal_the_tokens_of_the_message(client: Anthropic, engine: ScriptedEngine) -> None:
    request: Any = {
        "model": "tiny",
        "system": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}],
        "messages": [*HELLO["messages"], {"role": "assistant", "content": "yes"}, {"role": "user", "content": "é🦊"}],
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    count = client.messages.count_tokens(**request).input_tokens
    counted = engine.tokenizer.rendered
    usage = client.messages.create(**request, max_tokens=2000).usage
    assert engine.tokenizer.rendered == counted
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert len(engine.requests_seen) == 1, "counting sends the engine no request"
    long: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 5000}]}
    assert client.messages.count_tokens(**long).input_tokens > 5000, (
        "input that is too long for a message is counted too"
    )


def test_async_clients_get_the_same_answers(url: str, engine: ScriptedEngine) -> None:
    async def run() -> tuple[Any, list[str]]:
        async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            whole = await asyncio.gather(*(client.messages.create(**HELLO) for _ in range(8)))
            async with client.messages.stream(**HELLO) as stream:
                return list(whole), [text async for text in stream.text_stream]

    whole, pieces = asyncio.run(run())
    assert {message.content[0].text for message in whole} == {"hello world"}
    assert len({message.id for message in whole}) == 8
    assert "".join(pieces) == "hello world"


def test_disconnecting_frees_the_request(url: str, engine: ScriptedEngine) -> None:
    engine.hangs_at = 3

    async def run(half: Callable[[AsyncAnthropic], Any]) -> None:
        async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            await half(client)

    async def leave_stream(client: AsyncAnthropic) -> None:
        async with client.messages.stream(**HELLO) as stream:
            async for _ in stream.text_stream:
                assert engine.alive
                break

    async def cancel(client: AsyncAnthropic) -> None:
        asking = asyncio.create_task(client.messages.create(**HELLO))
        await until_async(lambda: engine.alive)
        asking.cancel()

    for half in (leave_stream, cancel):
        asyncio.run(run(half))
        wait_until(lambda: not engine.alive)


@pytest.mark.parametrize("named", ["api_key", "auth_token"])
def test_keys_are_accepted_in_either_header(serve: Serve, named: str) -> None:
    with serve(api_key=("sesame",)) as url:
        for header in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}):
            headers = {"anthropic-version": "2023-06-01", **header}
            answer = httpx.post(f"{url}/v1/messages", json=HELLO, headers=headers, timeout=60)
            assert answer.status_code == 200
        with Anthropic(base_url=url, **{named: "sesame"}, max_retries=0) as client:  # type: ignore[arg-type]
            assert client.messages.create(**HELLO).stop_reason == "end_turn"
        with (
            Anthropic(base_url=url, **{named: "wrong"}, max_retries=0) as client,  # type: ignore[arg-type]
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            client.messages.create(**HELLO)
    assert refused.value.type == "authentication_error"


def test_a_broken_stream_ends_with_an_error(client: Anthropic, engine: ScriptedEngine) -> None:
    engine.breaks_with = RequestFailedError()
    with client.messages.stream(**HELLO) as stream, pytest.raises(anthropic.APIStatusError) as broken:
        for _ in stream:
            pass
    assert broken.value.type == "api_error"
    assert broken.value.request_id
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**HELLO)


def test_the_real_engine_answers_equally_in_both_apis(address: str) -> None:
    request: Any = {"model": "tiny", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 12}
    chat = httpx.post(f"{address}/v1/chat/completions", json={**request, "temperature": 0}, timeout=60).json()
    with Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        message: Any = client.messages.create(**request, extra_body={"temperature": 0})
        with client.messages.stream(**request, extra_body={"temperature": 0}) as stream:
            streamed: Any = stream.get_final_message()
        count = client.messages.count_tokens(model="tiny", messages=request["messages"])
        unstopped = message.content[0].text
        stop = unstopped[3:6]
        stopped: Any = client.messages.create(**request, stop_sequences=[stop], extra_body={"temperature": 0})
    assert unstopped == streamed.content[0].text == chat["choices"][0]["message"]["content"]
    assert message.stop_reason == streamed.stop_reason == "max_tokens"
    assert message.usage.output_tokens == streamed.usage.output_tokens == 12
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert read == count.input_tokens == chat["usage"]["prompt_tokens"]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == unstopped[: unstopped.index(stop)]


class Verdict(BaseModel):
    """The schema of an answer."""

    ok: bool
    grade: Literal["good", "bad"]


def test_the_real_engine_follows_schemas_and_forced_tools(address: str) -> None:
    request: Any = {"model": "tiny", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 300}
    tools: Any = [
        {"name": name, "strict": True, "input_schema": transform_schema(Verdict)} for name in ("judge", "appraise")
    ]
    with Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        parsed: Any = client.messages.parse(**request, output_format=Verdict)
        assert isinstance(parsed.parsed_output, Verdict)
        assert parsed.stop_reason == "end_turn"
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "appraise"}):
            with client.messages.stream(**request, tools=tools, tool_choice=choice) as stream:  # type: ignore[arg-type]
                called: Any = stream.get_final_message()
            assert called.stop_reason == "tool_use"
            [call] = called.content
            assert call.name in ("judge", choice.get("name", "appraise"))
            assert choice.get("name") in (None, call.name)
            Verdict.model_validate(call.input, strict=True)
            short = client.messages.create(**{**request, "max_tokens": 9}, tools=tools, tool_choice=choice)  # type: ignore[arg-type]
            assert short.stop_reason == "max_tokens"
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            client.messages.create(
                **request, output_config={"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
            )
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            client.messages.create(
                **request,
                tools=[{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "nothing"}}}}],
                tool_choice={"type": "any"},
            )
