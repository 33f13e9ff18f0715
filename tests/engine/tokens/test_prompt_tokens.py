"""A prompt is first truncated, then its length is checked."""

from __future__ import annotations

import itertools

import pytest

from stoker_common.errors import RequestError
from stoker_engine.tokens.prompt_tokens import prompt_tokens

from .test_input_processor import INFO

LIMIT, VOCABULARY = INFO.max_model_len, INFO.vocab_size


@pytest.mark.parametrize("length", [0, 1, 2, LIMIT - 17, LIMIT - 1, LIMIT, LIMIT + 1, 3 * LIMIT])
def test_prompts_are_truncated_before_their_length_is_checked(length: int) -> None:
    prompt = [5 + i % 300 for i in range(length)]
    for truncate, max_tokens in itertools.product(
        (None, -1, 1, LIMIT - 1, LIMIT, 10**6), (None, 0, 1, 16, LIMIT, 10**6)
    ):
        room = max(1, LIMIT - (1 if max_tokens is None else max_tokens))
        kept = length if truncate is None else min(length, room if truncate == -1 else truncate)
        if 0 < kept <= LIMIT - (max_tokens != 0):
            assert prompt_tokens(prompt, truncate, max_tokens, INFO) == prompt[length - kept :]
            continue
        with pytest.raises(RequestError) as error:
            prompt_tokens(prompt, truncate, max_tokens, INFO)
        assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded" if kept else None)


@pytest.mark.parametrize("token", [-(2**70), -1, 0, VOCABULARY - 1, VOCABULARY, 2**70])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_tokens_outside_of_the_vocabulary_are_refused(token: int, at: int) -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11]
    prompt[at] = token
    if 0 <= token < VOCABULARY:
        assert prompt_tokens(prompt, None, 16, INFO) == prompt
        return
    with pytest.raises(RequestError, match=f"0 … {VOCABULARY - 1}") as error:
        prompt_tokens(prompt, None, 16, INFO)
    assert error.value.param == "prompt"


def test_list_of_the_caller_is_copied() -> None:
    prompt_list = [5, 6, 7]
    kept = prompt_tokens(prompt_list, None, 16, INFO)
    prompt_list.append(8)
    assert kept == [5, 6, 7]
