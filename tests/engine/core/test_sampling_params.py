"""Every kind of request parameters has all properties that the engine reads."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from typing import cast

import pytest

from stoker_common.errors import RequestError
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.request import Request
from stoker_engine.core.sampling_params import BaseParams, BeamSearchParams, RequestParams, SamplingParams
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.sizing.cache_groups import CacheGroup
from stoker_engine.tokens.input_processor import InputProcessor

EOS = frozenset({2})
INFO = EngineInfo(
    max_model_len=100,
    vocab_size=340,
    num_blocks=64,
    block_size=16,
    cache_groups=(CacheGroup(None, (0, 1), 8),),
    step_tokens=64,
    eos_token_ids=(2,),
    max_num_seqs=32,
    sampling_defaults={},
    max_logprobs=5,
    seed=7,
)
REGEX = StructuredOutputs(regex="a+")


@dataclass(frozen=True)
class PoolingParams(BaseParams):
    """A kind without sampling."""

    truncate_prompt_tokens: int | None = None


POOLING = cast(RequestParams, PoolingParams())
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(n=3, temperature=0.5, min_tokens=2, prompt_logprobs=1),
    "beams": BeamSearchParams(4, stop_token_ids=[7], length_penalty=2.0, early_stopping="never"),
    "pooling": POOLING,
}


@pytest.mark.parametrize(
    ("kind", "n", "num_wanted", "is_greedy", "num_in_lockstep", "min_tokens", "prompt_logprobs"),
    [
        ("greedy", 1, 16, True, 0, 0, None),
        ("drawn", 3, 16, False, 0, 2, 1),
        ("beams", 4, 16, False, 4, 0, None),
        ("pooling", 1, 0, False, 0, 0, None),
    ],
)
def test_properties_by_kind(
    kind: str,
    n: int,
    num_wanted: int,
    is_greedy: bool,
    num_in_lockstep: int,
    min_tokens: int,
    prompt_logprobs: int | None,
) -> None:
    params = KINDS[kind]
    assert params.n == n and params.num_wanted == num_wanted and params.is_greedy is is_greedy
    assert params.num_in_lockstep == num_in_lockstep
    assert params.min_tokens == min_tokens and params.prompt_logprobs == prompt_logprobs


@pytest.mark.parametrize("kind", KINDS)
def test_only_beam_search_creates_beams(kind: str) -> None:
    beams = KINDS[kind].new_beams(9, EOS)
    if kind != "beams":
        assert beams is None
        return
    assert beams is not None and (beams.width, beams.max_tokens, beams.end_tokens) == (4, 9, {2, 7})
    assert (beams.length_penalty, beams.early_stopping, beams.num_candidates) == (2.0, "never", 12)
    assert KINDS[kind].new_beams(9, EOS) is not beams


@pytest.mark.parametrize("kind", KINDS)
def test_structured_outputs_require_sampling_params(kind: str) -> None:
    params = KINDS[kind]
    assert params.with_structured_outputs(None) == params
    if isinstance(params, SamplingParams):
        assert params.with_structured_outputs(REGEX).structured_outputs is REGEX
    else:
        with pytest.raises(RequestError, match="not supported for this kind") as error:
            params.with_structured_outputs(REGEX)
        assert error.value.param == "structured_outputs"


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_only_generates_no_token(kind: str) -> None:
    params = KINDS[kind]
    if isinstance(params, SamplingParams):
        with pytest.raises(RequestError, match="only_scores"):
            params.scoring_only()  # unless max_tokens is 1
        scored = SamplingParams(max_tokens=1).scoring_only()
        assert scored.only_scores and scored.num_wanted == 0
    else:
        assert params.scoring_only() is params


@pytest.mark.parametrize("kind", KINDS)
def test_only_fields_are_serialized(kind: str) -> None:
    params = KINDS[kind]
    assert vars(params).keys() == {field.name for field in fields(params)}
    assert pickle.loads(pickle.dumps(params)) == params


def test_sampling_params_override_all_fields_of_base_params() -> None:
    assert BaseParams.__annotations__.keys() <= {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_every_kind_are_constructed(kind: str) -> None:
    params = KINDS[kind]
    spec = EngineRequest("r", [3, 4, 5], params, 4, eos_token_ids=EOS)
    request = Request(spec, (0,))
    assert spec.num_sequences == request.num_sequences == params.n
    assert (request.beams is not None) == (kind == "beams")
    assert request.wants_prompt_logprobs == (kind == "drawn")
    assert request.max_length == 7 and [sequence.token_ids for sequence in request.live] == [[3, 4, 5]]
    assert (LogitRules.of(spec) is not None) == (kind == "drawn")


@pytest.mark.parametrize("kind", KINDS)
def test_input_processor_accepts_every_kind(kind: str) -> None:
    """A prompt of the model's full length is refused unless nothing is generated; only samples draw seeds."""
    params = KINDS[kind]
    inputs = InputProcessor(INFO, None)
    seeds = [inputs.request("r", [3, 4, 5], params).seed for _ in range(2)]
    assert (seeds[0] != seeds[1]) == isinstance(params, SamplingParams)
    if not isinstance(params, SamplingParams):
        assert seeds == [0, 0]
    full = [3] * INFO.max_model_len
    if params is POOLING:
        assert inputs.request("r", full, params).max_tokens == 1
    else:
        with pytest.raises(RequestError):
            inputs.request("r", full, params)
