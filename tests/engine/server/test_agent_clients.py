"""Agent libraries, used like their users do: OpenAI's SDK and agents SDK, LangChain.

Loops use an engine with scripted output. Output forced by grammars comes from the real engine with a tiny random model
at a high temperature: whatever it writes must be valid.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from .conftest import sample, serving_fake, wait_until
from .scripted_engine import ScriptedEngine
from .test_tools import function

MESSAGES: Any = [{"role": "user", "content": "the quick fox"}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def scripted_server(*script: Any, **engine: Any) -> Iterator[tuple[ScriptedEngine, str]]:
    """Serve an engine with this scripted output; yield it and its URL."""
    scripted = ScriptedEngine(*script, **engine)
    with serving_fake(scripted, tool_call_parser="hermes", reasoning_parser="qwen3") as served:
        yield scripted, f"{served.url}/v1"


@asynccontextmanager
async def async_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


class Weather(BaseModel):
    """Tells the weather."""

    city: str = Field(max_length=12)
    unit: Literal["°C", "°F"]


class Trip(BaseModel):
    """Plans a trip."""

    class Stop(BaseModel):
        city: str = Field(max_length=8)
        nights: int = Field(ge=1, le=30)

    stops: list[Stop] = Field(min_length=1, max_length=2)
    weather: Weather | None


# OpenAI's agents SDK.

ran: list[str] = []


@function_tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    ran.append(city)
    return f"5 °C in {city}"


@pytest.mark.parametrize("streamed", [False, True])
def test_agents_sdk_runs_tools(streamed: bool) -> None:
    ran.clear()
    thought = "<think>Two cities.</think>"
    with scripted_server(
        f"{thought}{call('weather', city='Oslo')}\n{call('weather', city='Rome')}", f"{thought}Cold and warm."
    ) as (engine, url):

        async def run() -> Any:
            async with async_client(url) as client:
                model = OpenAIChatCompletionsModel("tiny", client)
                agent = Agent(name="a", instructions="be brief", tools=[weather], model=model)
                config = RunConfig(tracing_disabled=True)
                if not streamed:
                    return await Runner.run(agent, "how is it in Oslo and Rome?", run_config=config)
                result = Runner.run_streamed(agent, "how is it in Oslo and Rome?", run_config=config)
                async for _ in result.stream_events():
                    pass
                return result

        result = asyncio.run(run())
        assert result.final_output.strip() == "Cold and warm."
        assert sorted(ran) == ["Oslo", "Rome"]
        first, second = engine.requests_seen
        assert first[1].structured_outputs.structural_tag, "its tools are strict"
        messages = engine.tokenizer.rendered["messages"]
        assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool"]
        assert sorted(message["content"] for message in messages[3:]) == ["5 °C in Oslo", "5 °C in Rome"]
        assert len(second[0]) > len(first[0])


def test_agents_sdk_combines_an_output_type_with_tools() -> None:
    ran.clear()
    with scripted_server(f"</think>{call('weather', city='Oslo')}", '</think>{"city": "Oslo", "unit": "°C"}') as (
        engine,
        url,
    ):

        async def run() -> Any:
            async with async_client(url) as client:
                model = OpenAIChatCompletionsModel("tiny", client)
                agent = Agent(name="a", tools=[weather], output_type=Weather, model=model)
                return await Runner.run(agent, "Oslo?", run_config=RunConfig(tracing_disabled=True))

        assert asyncio.run(run()).final_output == Weather(city="Oslo", unit="°C")
        assert ran == ["Oslo"]
        structured = engine.requests_seen[0][1].structured_outputs
        assert structured.structural_tag["format"]["type"] == "or"
        assert structured.begins_after


def test_agents_sdk_executes_a_required_tool(address: str) -> None:
    """With the real engine: the call that the random model is forced to make is executed, and ends the run."""

    @function_tool
    def season(city: Literal["Oslo", "Rome"]) -> str:
        """Tells the season."""
        return f"winter in {city}"

    async def run() -> Any:
        async with async_client(f"{address}/v1") as client:
            settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=1.5, max_tokens=99)
            agent = Agent(
                name="a",
                tools=[season],
                model=OpenAIChatCompletionsModel("tiny", client),
                model_settings=settings,
                tool_use_behavior="stop_on_first_tool",
            )
            return await Runner.run(agent, "Oslo?", run_config=RunConfig(tracing_disabled=True))

    assert asyncio.run(run()).final_output in ("winter in Oslo", "winter in Rome")


# OpenAI's own client.


def is_valid(schema: Any, text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


@pytest.mark.parametrize(
    "choice, stream", [("required", True), ({"type": "function", "function": {"name": "Trip"}}, False)]
)
def test_forced_calls_are_valid(address: str, choice: Any, stream: bool) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    tools = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Trip)]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}  # type: ignore[index]
    finished = 0
    options: Any = {
        "model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": choice, "temperature": 1.5, "n": 8,
        "seed": 10, "max_tokens": 120, "parallel_tool_calls": False,
    }  # fmt: skip
    if stream:
        # The client raises if a choice is truncated and its tools are pydantic models.
        options["tools"] = [function(name, parameters) for name, parameters in schemas.items()]
        with client.chat.completions.stream(**options) as events:
            for _ in events:
                pass
            answer: Any = events.current_completion_snapshot
    else:
        answer = client.chat.completions.create(**options)
    for one in answer.choices:
        if one.finish_reason == "length":
            continue
        finished += 1
        (made,) = one.message.tool_calls
        assert is_valid(schemas[made.function.name], made.function.arguments), made
        assert not one.message.content
        assert one.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert finished >= 1


def test_openais_client_parses_output_and_calls(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    options: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 1.5, "max_tokens": 240}
    parsed = [
        client.chat.completions.parse(**options, seed=seed, response_format=Weather).choices[0].message.parsed
        for seed in range(1)
    ]
    assert all(isinstance(one, Weather) for one in parsed)
    called = client.chat.completions.parse(
        **options, seed=5, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required",
        parallel_tool_calls=False,
    ).choices[0].message.tool_calls  # fmt: skip
    assert called is not None
    assert isinstance(called[0].function.parsed_arguments, Weather)


@pytest.mark.parametrize("when", ["before", "in a call"])
def test_disconnecting_frees_the_request(address: str, when: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    text_tool: Any = {"type": "function", "function": {"name": "long", "parameters": schema}}
    with client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[text_tool], tool_choice="required", stream=True, temperature=1.5,
        max_tokens=400, extra_body={"min_tokens": 200},
    ) as stream:  # fmt: skip
        for event in stream:
            if when == "before" or event.choices[0].delta.tool_calls:
                break
    wait_until(lambda: sample(address, "vllm:num_requests_running") == 0)
    assert sample(address, "vllm:kv_cache_usage_perc") == 0


# LangChain.


@tool
def temperature(city: str) -> str:
    """Tells the temperature."""
    return f"5 °C in {city}"


def chat_of(url: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="none", model="tiny", **fields)


@pytest.mark.parametrize("streamed", [False, True])
def test_langchain_runs_a_tool_loop(streamed: bool) -> None:
    with scripted_server(f"</think>I look.{call('temperature', city='Oslo')}", "</think>It is cold.", piece=3) as (
        engine,
        url,
    ):
        chat = chat_of(url).bind_tools([temperature])

        def ask(messages: list[Any]) -> AIMessage:
            if not streamed:
                return chat.invoke(messages)
            whole: AIMessageChunk | None = None
            for chunk in chat.stream(messages):
                whole = chunk if whole is None else whole + chunk  # type: ignore[assignment, operator]
            assert whole is not None
            return whole

        messages: list[Any] = [HumanMessage("How cold is Oslo?")]
        messages.append(ask(messages))
        (made,) = messages[-1].tool_calls
        assert (made["name"], made["args"]) == ("temperature", {"city": "Oslo"})
        answer = temperature.invoke(made)
        assert isinstance(answer, ToolMessage)
        messages.append(answer)
        assert ask(messages).content == "It is cold."
        rendered = engine.tokenizer.rendered["messages"]
        assert rendered[1]["tool_calls"][0]["function"] == {"name": "temperature", "arguments": {"city": "Oslo"}}
        assert rendered[1]["tool_calls"][0]["id"] == rendered[2]["tool_call_id"]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_returns_structured_output(address: str, method: Any) -> None:
    chat = chat_of(f"{address}/v1", temperature=1.5, max_tokens=240, seed=4)
    answer = chat.with_structured_output(Weather, method=method).invoke("Oslo?")
    assert isinstance(answer, Weather)


def test_langchain_raises_refusals(address: str) -> None:
    chat = chat_of(f"{address}/v1").bind_tools([temperature])
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        asyncio.run(chat.ainvoke("Oslo?"))
    answer = httpx.get(f"{address}/health")
    assert answer.status_code == 200
