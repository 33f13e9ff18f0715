"""OpenAI's client, its agents SDK and LangChain with /v1/responses, used like their users do.

They use the real engine on a tiny model and, where a model must call tools, a scripted one. Sockets are real.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import agents
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from stoker_engine.server.app import create_app

from .conftest import FakeEngine, Listen, MakeService, sample, wait_until

agents.set_tracing_disabled(True)
GREEDY: Any = {"model": "tiny", "temperature": 0}


@pytest.fixture
def real(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.info = replace(engine.info, max_model_len=8192)
    return engine


@pytest.fixture
def fake_url(make_service: MakeService, listen: Listen) -> Iterator[str]:
    """URL of a server with the fake engine, whose model writes calls like Hermes, and reasons like Qwen 3."""
    app = create_app(make_service(tool_call_parser="hermes", reasoning_parser="qwen3"))
    with listen(app) as (host, port):
        yield f"http://{host}:{port}/v1"


@pytest.fixture
def fake(fake_url: str) -> OpenAI:
    return OpenAI(base_url=fake_url, api_key="none", max_retries=0)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_responses_equal_the_chats_answers(real: OpenAI) -> None:
    chat = real.chat.completions.create(
        messages=[{"role": "user", "content": "the quick fox"}], max_tokens=24, **GREEDY
    )
    whole = real.responses.create(input="the quick fox", max_output_tokens=24, **GREEDY)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 24)

    with real.responses.stream(input="the quick fox", max_output_tokens=24, **GREEDY) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 24


def test_a_conversation_continues_by_previous_response_id(real: OpenAI) -> None:
    first = real.responses.create(input="the quick fox", max_output_tokens=8, **GREEDY)
    second = real.responses.create(
        input="jumps", previous_response_id=first.id, max_output_tokens=8, include=["message.output_text.logprobs"],
        top_logprobs=2, **GREEDY,
    )  # fmt: skip
    messages: Any = [
        {"role": "user", "content": "the quick fox"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "jumps"},
    ]
    chat = real.chat.completions.create(messages=messages, max_tokens=8, logprobs=True, top_logprobs=2, **GREEDY)
    assert second.output_text == chat.choices[0].message.content
    again = real.responses.create(input=messages, max_output_tokens=8, **GREEDY)
    assert again.output_text == second.output_text
    message: Any = second.output[0]
    expected: Any = chat.choices[0].logprobs
    assert [each.logprob for each in message.content[0].logprobs] == pytest.approx(
        [each.logprob for each in expected.content], abs=1e-4
    )
    assert [[top.token for top in each.top_logprobs] for each in message.content[0].logprobs] == [
        [top.token for top in each.top_logprobs] for each in expected.content
    ]
    assert real.responses.retrieve(second.id).output_text == second.output_text
    items = real.responses.input_items.list(second.id, order="asc")
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]
    real.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        real.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError):
        real.responses.cancel(first.id)


class Place(BaseModel):
    """Output type of the model."""

    model_config = {"extra": "forbid"}
    name: Literal["Oslo", "Bergen"]
    warm: bool


def test_openais_client_parses_the_output(real: OpenAI) -> None:
    """A finite schema: whatever a random model prefers, its output ends, and is valid."""
    request: Any = {"model": "tiny", "temperature": 1.5, "text_format": Place, "max_output_tokens": 200}
    whole = real.responses.parse(input="where?", **request)
    assert whole.status == "completed"
    assert isinstance(whole.output_parsed, Place)
    with real.responses.stream(input="where?", **request) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Place)
    cut = real.responses.create(
        model="tiny", input="where?", max_output_tokens=3, text={"format": {"type": "json_object"}}
    )
    assert cut.status == "incomplete"
    assert cut.output_text.lstrip()[:1] in ("{", "")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "go"}])
def test_forced_calls_are_valid(real: OpenAI, stream: bool, choice: Any) -> None:
    tools = [openai.pydantic_function_tool(Place, name="go")["function"]]
    request: Any = {
        "model": "tiny",
        "input": "where?",
        "temperature": 1.5,
        "tools": [{"type": "function", **tool} for tool in tools],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    if stream:
        with real.responses.stream(**request) as events:
            answer: Any = events.get_final_response()
    else:
        answer = real.responses.create(**request)
    assert answer.status == "completed"
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "go")
    Place.model_validate_json(call.arguments)


def test_too_long_inputs_are_refused_or_truncated(real: OpenAI) -> None:
    length = real.models.retrieve("tiny").max_model_len  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError) as error:
        real.responses.create(input="over " * length, **GREEDY)
    assert (error.value.param, error.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as error:
        real.responses.create(input="over", max_output_tokens=length + 1, **GREEDY)
    assert error.value.param == "max_output_tokens"
    cut = real.responses.create(input="over " * length, truncation="auto", max_output_tokens=8, **GREEDY)
    assert cut.usage is not None
    assert cut.usage.total_tokens <= length


def test_closing_a_stream_frees_its_blocks(real: OpenAI, address: str) -> None:
    extra = {"ignore_eos": True}
    with real.responses.create(input="a", stream=True, extra_body=extra, **GREEDY) as stream:
        kinds = [event.type for event, _ in zip(stream, range(6), strict=False)]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    wait_until(lambda: sample(address, "vllm:num_requests_running") == 0)
    assert sample(address, "vllm:kv_cache_usage_perc") == 0


def test_output_is_sent_back_with_tool_results(engine: FakeEngine, fake: OpenAI) -> None:
    """As in OpenAI's guide: the whole output is sent back with the results."""
    tools: Any = [
        {
            "type": "function",
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "strict": False,
        }
    ]
    engine.answer = "<think>two cities</think>" + call_text("weather", {"city": "Oslo"})
    engine.answer += call_text("weather", {"city": "Bergen"})
    conversation: Any = [{"role": "user", "content": "Is it warm?"}]
    answer = fake.responses.create(model="tiny", input=conversation, tools=tools)
    conversation += answer.output
    for item in answer.output:
        if item.type == "function_call":
            city = json.loads(item.arguments)["city"]
            conversation.append({"type": "function_call_output", "call_id": item.call_id, "output": f"{city}: 3"})
    engine.answer = "<think>so</think>It is cold."
    final = fake.responses.create(model="tiny", input=conversation, tools=tools)
    assert final.output_text == "It is cold."
    _, assistant, *results = engine.tokenizer.rendered["messages"]
    assert assistant["reasoning"] == "two cities"
    assert [call["function"]["arguments"]["city"] for call in assistant["tool_calls"]] == ["Oslo", "Bergen"]
    assert [result["content"] for result in results] == ["Oslo: 3", "Bergen: 3"]
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in assistant["tool_calls"]]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("by_id", [True, False])
def test_an_agent_uses_a_tool(engine: FakeEngine, fake_url: str, stream: bool, by_id: bool) -> None:
    called: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        called.append(city)
        engine.answer = "<think>cold</think>Take a coat."
        return "3 degrees"

    engine.answer = "<think>I must look</think>" + call_text("weather", {"city": "Oslo"})

    async def run() -> tuple[str, int]:
        async with AsyncOpenAI(base_url=fake_url, api_key="none", max_retries=0) as client:
            agent = Agent(
                "dresser",
                instructions="Say what to wear.",
                model=OpenAIResponsesModel("tiny", client),
                tools=[weather],
                model_settings=ModelSettings(temperature=0, parallel_tool_calls=True),
            )
            options: Any = {"auto_previous_response_id": by_id}
            if not stream:
                result: Any = await Runner.run(agent, "Oslo?", **options)
            else:
                result = Runner.run_streamed(agent, "Oslo?", **options)
                async for _ in result.stream_events():
                    pass
            return result.final_output, result.context_wrapper.usage.output_tokens

    text, tokens = asyncio.run(run())
    assert text == "Take a coat."
    assert called == ["Oslo"]
    assert tokens > 20
    system, user, assistant, tool = engine.tokenizer.rendered["messages"]
    assert system == {"role": "system", "content": "Say what to wear."}
    assert user["content"] == "Oslo?"
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert tool["content"] == "3 degrees"


@pytest.mark.parametrize("stream", [True, False])
def test_langchain_calls_a_tool(engine: FakeEngine, fake_url: str, stream: bool) -> None:
    @tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return f"{city}: 3 degrees"

    model: Any = ChatOpenAI(base_url=fake_url, api_key="none", model="tiny", use_responses_api=True, max_retries=0)  # type: ignore[arg-type]  # fmt: skip
    bound = model.bind_tools([weather])

    def ask(messages: list[Any]) -> Any:
        if not stream:
            return bound.invoke(messages)
        first, *rest = bound.stream(messages)
        return sum(rest, start=first)

    engine.answer = "<think>I must look</think>" + call_text("weather", {"city": "Oslo"})
    messages: list[Any] = [("human", "Oslo?")]
    answer = ask(messages)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Oslo"})]
    results = [weather.invoke(call) for call in answer.tool_calls]
    engine.answer = "<think>cold</think>Take a coat."
    final = ask([*messages, answer, *results])
    assert final.text == "Take a coat."
    assert final.usage_metadata["output_token_details"]["reasoning"] > 0
    _, assistant, result = engine.tokenizer.rendered["messages"]
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert result["content"] == "Oslo: 3 degrees"


def test_responses_of_another_server_are_not_found(fake: OpenAI, real: OpenAI) -> None:
    answer = fake.responses.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError) as error:
        real.responses.create(model="tiny", input="b", previous_response_id=answer.id)
    assert "only the server that created a response" in error.value.message
