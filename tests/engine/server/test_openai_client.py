"""OpenAI's client with the real engine, over real sockets; outputs are compared with transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ..conftest import AssertGreedy
from .conftest import CHAT_TEMPLATE, sample, wait_until

MESSAGES: Any = [{"role": "user", "content": "the quick fox"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 24}
IDS: Any = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}


@pytest.fixture
def openai_client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> PreTrainedTokenizerFast:
    """transformers' tokenizer."""
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Any:
    """Log-probabilities of all tokens at all positions, by transformers. (tokens) → [len, vocabulary]"""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def logprobs(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return logprobs


def test_completion_is_greedy(
    openai_client: OpenAI, tokenizer: PreTrainedTokenizerFast, tiny_llama: Path, assert_greedy: AssertGreedy
) -> None:
    whole = openai_client.completions.create(model="tiny", prompt="the lazy dog", **GREEDY, **IDS)
    choice: Any = whole.choices[0]
    assert choice.prompt_token_ids == tokenizer("the lazy dog").input_ids
    assert_greedy(tiny_llama, choice.prompt_token_ids, choice.token_ids)
    assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24

    stream = openai_client.completions.create(model="tiny", prompt="the lazy dog", stream=True, **GREEDY, **IDS)
    events: list[Any] = list(stream)
    assert "".join(event.choices[0].text for event in events) == choice.text
    assert [token for event in events for token in event.choices[0].token_ids] == choice.token_ids


def test_chat_is_greedy(
    openai_client: OpenAI, tokenizer: PreTrainedTokenizerFast, tiny_llama: Path, assert_greedy: AssertGreedy
) -> None:
    whole: Any = openai_client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY, **IDS)
    choice = whole.choices[0]
    rendered: Any = tokenizer.apply_chat_template(
        MESSAGES, chat_template=CHAT_TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    assert whole.prompt_token_ids == rendered
    assert_greedy(tiny_llama, whole.prompt_token_ids, choice.token_ids)

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
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_logprobs_are_the_models(openai_client: OpenAI, reference: Any) -> None:
    answer = openai_client.completions.create(
        model="tiny", prompt="the lazy dog jumps", echo=True, logprobs=3, temperature=0, max_tokens=8, **IDS
    )
    choice: Any = answer.choices[0]
    tokens = choice.prompt_token_ids + choice.token_ids
    expected = reference(tokens)
    reported = choice.logprobs
    assert reported.token_logprobs[0] is None
    chosen = [float(expected[position, token]) for position, token in enumerate(tokens[1:])]
    assert reported.token_logprobs[1:] == pytest.approx(chosen, abs=1e-4)
    for position, top in enumerate(reported.top_logprobs[1:]):
        best = {*expected[position].topk(3).values.tolist(), chosen[position]}
        assert sorted(top.values()) == pytest.approx(sorted(best), abs=1e-4), (
            "the three likeliest tokens, and the token itself"
        )


def test_chat_logprobs_are_the_models(openai_client: OpenAI, reference: Any) -> None:
    answer: Any = openai_client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=4, temperature=1, seed=5, max_tokens=8, **IDS
    )
    choice = answer.choices[0]
    expected = reference(answer.prompt_token_ids + choice.token_ids)[len(answer.prompt_token_ids) - 1 :]
    for position, (token, reported) in enumerate(zip(choice.token_ids, choice.logprobs.content, strict=True)):
        assert reported.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
        best = expected[position].topk(4).values.tolist()
        assert [top.logprob for top in reported.top_logprobs] == pytest.approx(best, abs=1e-4)
    text = b"".join(bytes(reported.bytes) for reported in choice.logprobs.content)
    assert text.decode(errors="replace") == choice.message.content


def test_seeded_choices_are_reproducible(openai_client: OpenAI) -> None:
    def texts(n: int) -> list[str]:
        answer = openai_client.completions.create(
            model="tiny", prompt="over", n=n, seed=7, temperature=1, max_tokens=16
        )
        return [choice.text for choice in answer.choices]

    four = texts(4)
    assert len(set(four)) == 4
    assert texts(4) == four
    assert texts(1) == four[:1]


def test_sampling_fields_take_effect(openai_client: OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    def tokens(**fields: Any) -> list[int]:
        extra = {"return_token_ids": True, "ignore_eos": True, **fields}
        answer = openai_client.completions.create(model="tiny", prompt="the", **GREEDY, extra_body=extra)
        choice: Any = answer.choices[0]
        return list(choice.token_ids)

    free = tokens()
    assert tokens(logit_bias={"40": 100}) == [40] * 24
    assert free[0] not in tokens(logit_bias={str(free[0]): -100})
    assert set(tokens(allowed_token_ids=[41, 42])) <= {41, 42}
    assert len(set(tokens(logit_bias={"40": 20}, repetition_penalty=10.0))) > 1
    stopped = tokens(stop_token_ids=[free[3]])
    assert stopped == free[: free.index(free[3]) + 1]


def test_beam_search_equals_transformers(openai_client: OpenAI, tiny_llama: Path) -> None:
    answer: Any = openai_client.completions.create(
        model="tiny",
        prompt=[5, 6, 7, 8],
        n=4,
        max_tokens=12,
        extra_body={"use_beam_search": True, "return_token_ids": True, "ignore_eos": True},
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    expected = model.generate(
        torch.tensor([[5, 6, 7, 8]]),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert [choice.token_ids for choice in answer.choices] == expected[:, 4:].tolist()


def test_a_chat_without_a_limit_may_fill_the_context(openai_client: OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == openai_client.models.retrieve("tiny").max_model_len  # type: ignore[attr-defined]
    assert answer.choices[0].finish_reason == "length"


def test_a_repeated_prompt_is_cached(openai_client: OpenAI) -> None:
    prompt = "again and again, " * 8
    for _ in range(2):
        answer: Any = openai_client.completions.create(model="tiny", prompt=prompt, **GREEDY)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_a_stop_string_ends_the_text(openai_client: OpenAI) -> None:
    def choice(**fields: Any) -> Any:
        extra = {"ignore_eos": True, **fields}
        answer = openai_client.completions.create(model="tiny", prompt="the lazy dog", **GREEDY, extra_body=extra)
        return answer.choices[0]

    free = choice().text
    stop = free[5:8]
    stopped = choice(stop=stop)
    assert stopped.text == free[: free.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert choice(stop=stop, include_stop_str_in_output=True).text == stopped.text + stop


def test_errors_raise_the_clients_exceptions(openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.completions.create(model="tiny", prompt=[5] * 512)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as outside:
        openai_client.completions.create(model="tiny", prompt=[[5], [10**30]], stream=True)
    assert outside.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as too_many:
        openai_client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=21)
    assert too_many.value.param == "top_logprobs"
    assert [model.id for model in openai_client.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 2**31 - 1},
        {"top_p": 1e-300},
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"min_p": 1, "temperature": 2},
        {"seed": -(2**63)},
        {"logit_bias": {str(token): -100 for token in range(300)}},
        {"n": 128, "max_tokens": 1},
    ],
)
def test_extreme_parameters_are_served(address: str, sampling: dict[str, object]) -> None:
    body = {"prompt": "the", "max_tokens": 4, **sampling}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert httpx.get(f"{address}/health").status_code == 200


def test_64_concurrent_streams_equal_single_requests(address: str, openai_client: OpenAI) -> None:
    def tokens(number: int) -> list[int]:
        choice: Any = openai_client.completions.create(
            model="tiny", prompt=f"the quick fox {number}", **GREEDY, **IDS
        ).choices[0]
        return list(choice.token_ids)

    async def stream(client: AsyncOpenAI, number: int) -> list[int]:
        events: Any = await client.completions.create(
            model="tiny", prompt=f"the quick fox {number % 8}", stream=True, **GREEDY, **IDS
        )
        return [token async for event in events for token in event.choices[0].token_ids]

    async def run() -> list[list[int]]:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(64)))

    outputs = asyncio.run(run())
    alone = [tokens(number) for number in range(8)]
    assert outputs == [alone[number % 8] for number in range(64)]
    assert sample(address, "vllm:kv_cache_usage_perc") == 0


def test_metrics_count_a_request(address: str) -> None:
    def values() -> list[float]:
        return [
            sample(address, "vllm:prompt_tokens_total"),
            sample(address, "vllm:generation_tokens_total"),
            sample(address, "vllm:request_success_total", finished_reason="length"),
            sample(address, "vllm:time_to_first_token_seconds_count"),
            sample(address, "vllm:inter_token_latency_seconds_count"),
        ]

    before = values()
    body = {"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True}
    httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    wait_until(lambda: sample(address, "vllm:num_requests_running") == 0)
    assert [after - b for after, b in zip(values(), before, strict=True)] == [3, 10, 1, 1, 9]
    assert sample(address, "vllm:kv_cache_usage_perc") == 0


def test_metrics_keep_their_names_for_any_accept_header(address: str) -> None:
    for accept in ("application/openmetrics-text; version=1.0.0", "text/plain; version=1.0.0", "*/*"):
        answer = httpx.get(f"{address}/metrics", headers={"accept": accept})
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in answer.text
        assert answer.headers["content-type"].startswith("text/plain")
