"""Invalid requests are refused before they reach the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from stoker_common import logs
from stoker_common.block_hash import CacheKeys
from stoker_common.errors import RequestError
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.sizing.cache_groups import CacheGroup
from stoker_engine.tokens.input_processor import InputProcessor
from stoker_engine.tokens.prompt_tokens import prompt_tokens
from stoker_engine.tokens.tokenizer import Tokenizer

INFO = EngineInfo(
    max_model_len=100,
    vocab_size=340,
    num_blocks=64,
    block_size=16,
    cache_groups=(CacheGroup(None, (0, 1), 8),),
    step_tokens=64,
    eos_token_ids=(1,),
    max_num_seqs=32,
    sampling_defaults={},
    max_logprobs=5,
    seed=7,
)


@pytest.fixture(scope="module")
def tokenizer(byte_level: Backend) -> Tokenizer:
    return Tokenizer(byte_level)


@pytest.mark.parametrize(
    "prompt, params, param",
    [
        ([], {}, "prompt"),
        ([340], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5] * 100, {}, "prompt"),
        ([5] * 90, {"max_tokens": 11}, "max_tokens"),
        ([5] * 99, {"max_tokens": None, "min_tokens": 2}, "min_tokens"),
        ([5], {"stop_token_ids": (340,)}, "stop_token_ids"),
        ([5], {"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ([5], {"logit_bias": {999: 1}}, "logit_bias"),
        ([5], {"stop_token_ids": [5] * 341}, "stop_token_ids"),
        ([5], {"allowed_token_ids": list(range(341))}, "allowed_token_ids"),
        ([5], {"logprobs": 6}, "logprobs"),
        ([5], {"logprobs": -1}, "logprobs"),
        ([5], {"prompt_logprobs": 6}, "prompt_logprobs"),
        ([5], {"bad_words": tuple(f"word{i}" for i in range(1100))}, "bad_words"),
    ],
)
def test_invalid_requests_are_refused(
    tokenizer: Tokenizer, prompt: list[int], params: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as error:
        InputProcessor(INFO, tokenizer).request("r", prompt, SamplingParams(**params))
    assert error.value.param == param
    if len(prompt) > 80 and param != "min_tokens":
        assert error.value.code == "context_length_exceeded"


def test_unset_parameters_get_defaults(tokenizer: Tokenizer) -> None:
    inputs = InputProcessor(INFO, tokenizer)
    request = inputs.request("r", [5] * 40, SamplingParams(max_tokens=None), priority=3, cache_salt="s")
    assert (request.max_tokens, request.eos_token_ids) == (60, {1})
    assert (request.priority, request.cache_keys) == (3, CacheKeys("s"))
    again = InputProcessor(INFO, tokenizer)
    seeds = [inputs.request("r", [5], SamplingParams()).seed for _ in range(3)]
    assert [again.request("r", [5], SamplingParams()).seed for _ in range(4)][1:] == seeds
    assert len(set(seeds)) == 3
    assert inputs.request("r", [5], SamplingParams(seed=-5)).seed == -5
    assert InputProcessor(replace(INFO, max_logprobs=-1), tokenizer).request("r", [5], SamplingParams(logprobs=-1))


def test_bad_words_are_encoded_with_and_without_a_leading_space(tokenizer: Tokenizer) -> None:
    request = InputProcessor(INFO, tokenizer).request("r", [5], SamplingParams(bad_words=("the", " quick")))
    plain, spaced = tokenizer.encode("the", False), tokenizer.encode(" the", False)
    assert tuple(plain) in request.bad_words
    if len(plain) == len(spaced):
        assert tuple(spaced) in request.bad_words
    assert tuple(tokenizer.encode("quick", False)) in request.bad_words


def test_bad_words_are_encoded_once_for_all_prompts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = tokenizer.encode_batch, list[int]()

    def counted(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        calls.append(len(texts))
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    inputs = InputProcessor(INFO, tokenizer)
    params = SamplingParams(bad_words=("the", "quick"))
    requests = [inputs.request(str(number), [5], params) for number in range(5)]
    assert calls == [4]
    assert len({request.bad_words for request in requests}) == 1
    with pytest.raises(RequestError, match="at most"):
        inputs.request("r", [5], SamplingParams(bad_words=("a",) * 1001))
    assert calls == [4], "too many bad words were encoded"


def test_truncation_keeps_the_end_of_a_prompt(tokenizer: Tokenizer) -> None:
    prompt = list(range(5, 205))
    for truncate, length in ((3, 3), (-1, 100 - 16)):
        assert prompt_tokens(prompt, truncate, SamplingParams().max_tokens, INFO) == prompt[-length:]
    with pytest.raises(RequestError, match="the prompt has 200"):
        prompt_tokens(prompt, None, 16, INFO)
    request = InputProcessor(INFO, tokenizer).request("r", prompt, SamplingParams(truncate_prompt_tokens=-1))
    assert len(request.prompt_token_ids) + request.max_tokens == INFO.max_model_len


def test_beams_must_fit_at_once(tokenizer: Tokenizer) -> None:
    inputs = InputProcessor(INFO, tokenizer)
    assert inputs.request("r", [5] * 40, BeamSearchParams(4, max_tokens=20)).num_sequences == 4
    for width, max_tokens in ((33, 1), (32, 60)):
        with pytest.raises(RequestError) as error:
            inputs.request("r", [5] * 40, BeamSearchParams(width, max_tokens=max_tokens))
        assert error.value.param == "n"


def test_requests_carry_the_id_of_the_log(tokenizer: Tokenizer) -> None:
    inputs = InputProcessor(INFO, tokenizer)
    token = logs.request_id.set("r-1")
    try:
        named = inputs.request("r", [5], SamplingParams())
    finally:
        logs.request_id.reset(token)
    assert named.log_fields == {"request_id": "r-1"}
    assert inputs.request("r", [5], SamplingParams()).log_fields == {"request_id": None}
