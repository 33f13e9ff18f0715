"""A request's logit rules are created once, bounded, and updated with each token."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_common.errors import RequestError
from stoker_engine.core.bad_words import BadWords
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.core.token_counts import TokenCounts
from stoker_engine.core.token_ids import TokenIds

TOKEN = st.integers(0, 5)


def held(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.tokens, counts.counts, strict=True))


@given(st.lists(TOKEN), st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=40))
def test_token_counts_equal_the_definition_also_in_forks(prompt: list[int], steps: list[tuple[bool, int]]) -> None:
    families = [(TokenCounts(prompt), list[int]())]
    for forks, token in steps:
        counts, output = families[-1]
        if forks:
            counts, output = counts.copy(), list(output)
            families.append((counts, output))
        counts.add(token)
        output.append(token)
    for counts, output in families:
        assert held(counts) == {token: output.count(token) for token in {*prompt, *output}}


def test_token_counts_grow_beyond_their_initial_capacity() -> None:
    tokens = [random.Random(0).randrange(5000) for _ in range(9000)]
    counts = TokenCounts([7, 7, 4999])
    for token in tokens:
        counts.add(token)
    tokens_of, expected = np.unique([*tokens, 7, 4999], return_counts=True)
    assert held(counts) == {t: n - (t in (7, 4999)) for t, n in zip(tokens_of.tolist(), expected.tolist(), strict=True)}


@given(st.lists(st.lists(TOKEN, min_size=1, max_size=4), min_size=1, max_size=8), st.lists(TOKEN, max_size=12))
def test_bad_word_completions_equal_the_definition(words: list[list[int]], known: list[int]) -> None:
    num_prompt = min(3, len(known))
    output = known[num_prompt:]
    by_definition = {word[-1] for word in words if len(word) == 1 or output[1 - len(word) :] == word[:-1]}
    assert set(BadWords(words).completions(known, num_prompt)) == by_definition


def test_bad_word_search_reads_no_further_than_the_longest_word() -> None:
    class Counting(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counting.reads += 1
            return super().__getitem__(index)

    words = BadWords([[5] * length for length in range(1, 100)])
    words.completions(Counting([5] * 5000), 0)
    assert Counting.reads <= 100


def test_token_ids_behave_as_a_set() -> None:
    ids = TokenIds([9, 3, 9, 4])
    assert (list(ids), len(ids), ids.num_given) == ([3, 4, 9], 3, 4)
    assert 4 in ids and 5 not in ids and 10**30 not in ids and "x" not in ids
    assert pickle.loads(pickle.dumps(ids)) == ids == [3, 4, 9]
    crossed = [pickle.loads(pickle.dumps(TokenIds(range(100_000)))) for _ in range(3)]
    assert crossed[0] is crossed[1] is crossed[2]  # shared by the prompts of a request
    assert crossed[0] == TokenIds(range(100_000)) and len(pickle.dumps(crossed[0])) < 401_000
    assert pickle.loads(pickle.dumps(TokenIds([-5, 2**40]))) == [-5, 2**40]
    narrow = pickle.loads(pickle.dumps(TokenIds([3, 5])))
    wide = pickle.loads(pickle.dumps(TokenIds([3 + (5 << 32)] * 2)))  # the same bytes in 64 bits
    assert narrow == [3, 5] and wide == [3 + (5 << 32)]
    assert [index for index, is_in in enumerate(ids.mask(12)) if is_in] == [3, 4, 9]
    assert len(repr(TokenIds(range(100_000)))) < 100


@pytest.mark.parametrize("wrong", [["a"], [1.5], [None], [[1]], [10**30], [True], 5])
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_invalid_token_ids_are_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: wrong})
    assert refused.value.param == name


def test_more_logit_biases_than_openai_permits_are_refused() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0))
    with pytest.raises(RequestError, match="301 tokens; at most 300") as refused:
        SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0))
    assert refused.value.param == "logit_bias"


def test_beam_search_limits_its_stop_tokens() -> None:
    assert BeamSearchParams(2, stop_token_ids=[4, 3, 4]).stop_token_ids == (3, 4)
    BeamSearchParams(128, stop_token_ids=range(7))
    with pytest.raises(RequestError, match="128 beams take at most 7 stop_token_ids, got 8") as refused:
        BeamSearchParams(128, stop_token_ids=range(8))
    assert refused.value.param == "stop_token_ids"


def test_prompts_of_a_request_share_its_bad_words() -> None:
    """Each token of a bad word is an object: a hundred prompts would create them a hundred times."""
    requests = [
        EngineRequest(str(number), [5], SamplingParams(), max_tokens=5, bad_words=((6, 7), (8, 9)))
        for number in range(2)
    ]
    first, second = (LogitRules.of(pickle.loads(pickle.dumps(each))) for each in requests)
    assert first is not None and second is not None
    assert first.bad_words is second.bad_words
