"""OpenAI's own client against the real engine, over real sockets."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from stoker_engine.async_llm import AsyncLLM
from stoker_engine.core.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "the quick fox"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
IDS = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}


@pytest.fixture
def openai_client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def _expected(llm: AsyncLLM, prompt: list[int]) -> list[int]:
    """What the engine itself says, without a server."""

    async def run() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        return [t async for delta in llm.generate("expected", prompt, params) for t in delta.token_ids]

    return asyncio.run(run())


def test_completion_is_the_engines(llm: AsyncLLM, openai_client: OpenAI) -> None:
    whole = openai_client.completions.create(model="tiny", prompt="the lazy dog", **GREEDY, **IDS)
    choice = whole.choices[0]
    assert choice.token_ids == _expected(llm, choice.prompt_token_ids)
    assert choice.prompt_token_ids == llm.tokenizer.encode("the lazy dog")
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 24

    stream = openai_client.completions.create(model="tiny", prompt="the lazy dog", stream=True, **GREEDY, **IDS)
    events = list(stream)
    assert "".join(event.choices[0].text for event in events) == choice.text
    assert [token for event in events for token in event.choices[0].token_ids] == choice.token_ids


def test_chat_is_the_engines(llm: AsyncLLM, openai_client: OpenAI) -> None:
    whole = openai_client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY, **IDS)
    choice = whole.choices[0]
    assert whole.prompt_token_ids == llm.tokenizer.render_chat(MESSAGES)
    assert choice.token_ids == _expected(llm, whole.prompt_token_ids)

    stream = openai_client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
        **IDS,
    )
    *events, last = list(stream)
    assert "".join(event.choices[0].delta.content or "" for event in events) == choice.message.content
    assert last.usage.completion_tokens == 24
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_chat_without_a_limit_may_fill_the_context(llm: AsyncLLM, openai_client: OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == llm.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_a_repeated_prompt_is_cached(openai_client: OpenAI) -> None:
    prompt = "again and again, " * 8
    for _ in range(2):
        answer = openai_client.completions.create(model="tiny", prompt=prompt, **GREEDY)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_a_seed_makes_it_reproducible(openai_client: OpenAI) -> None:
    texts = {
        openai_client.completions.create(model="tiny", prompt="over", seed=7, temperature=1, max_tokens=16)
        .choices[0]
        .text
        for _ in range(3)
    }
    assert len(texts) == 1


def test_a_stop_string_ends_the_text(openai_client: OpenAI) -> None:
    free = openai_client.completions.create(model="tiny", prompt="the lazy dog", **GREEDY, **IDS).choices[0].text
    stop = free[5:8]
    choice = openai_client.completions.create(model="tiny", prompt="the lazy dog", stop=stop, **GREEDY, **IDS).choices[
        0
    ]
    assert choice.text == free[: free.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_errors_are_the_clients_own(llm: AsyncLLM, openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.completions.create(model="tiny", prompt=[5] * llm.max_model_len)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as outside:
        openai_client.completions.create(model="tiny", prompt=[[5], [10**30]], stream=True)
    assert outside.value.param == "prompt"
    assert [model.id for model in openai_client.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 2**31 - 1},
        {"top_p": 1e-300},
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"stop_token_ids": [2**63 - 1, -5]},
        {"seed": -(2**63)},
    ],
)
def test_extreme_parameters_hurt_nobody(llm: AsyncLLM, address: str, sampling: dict[str, object]) -> None:
    body = {"prompt": "the", "max_tokens": 4, **sampling}
    answer = httpx.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert llm.is_healthy


def test_64_clients_stream_at_once(llm: AsyncLLM, address: str) -> None:
    async def stream(client: AsyncOpenAI, number: int) -> list[int]:
        events = await client.completions.create(
            model="tiny", prompt=f"the quick fox {number % 8}", stream=True, **GREEDY, **IDS
        )
        return [token async for event in events for token in event.choices[0].token_ids]

    async def run() -> list[list[int]]:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(64)))

    outputs = asyncio.run(run())
    alone = [_expected(llm, llm.tokenizer.encode(f"the quick fox {number}")) for number in range(8)]
    assert outputs == [alone[number % 8] for number in range(64)]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.kv.usage == 0


def test_metrics_tell_what_happened(address: str) -> None:
    def value(name: str, **labels: str) -> float:
        labels |= {"model_name": "tiny", "engine": "0"}
        families = text_string_to_metric_families(httpx.get(f"{address}/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return next(sample.value for sample in samples if sample.labels == labels)

    def values() -> list[float]:
        return [
            value("vllm:prompt_tokens_total"),
            value("vllm:generation_tokens_total"),
            value("vllm:request_success_total", finished_reason="length"),
            value("vllm:time_to_first_token_seconds_count"),
            value("vllm:inter_token_latency_seconds_count"),
        ]

    before = values()
    httpx.post(f"{address}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True})
    assert [after - b for after, b in zip(values(), before, strict=True)] == [3, 10, 1, 1, 9]
    assert value("vllm:num_requests_running") == 0
    assert value("vllm:kv_cache_usage_perc") == 0


def test_metrics_keep_their_names_whatever_the_scraper_prefers(address: str) -> None:
    for accept in ("application/openmetrics-text; version=1.0.0", "text/plain; version=1.0.0", "*/*"):
        answer = httpx.get(f"{address}/metrics", headers={"accept": accept})
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in answer.text
        assert answer.headers["content-type"].startswith("text/plain")
