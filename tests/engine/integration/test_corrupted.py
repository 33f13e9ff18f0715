"""Requests with NaN logits end with an error; other requests in the same steps are exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stoker_engine import LLM, BeamSearchParams, SamplingParams
from stoker_engine.core.finish_reason import FinishReason

BAD = 7  # the token whose embedding is damaged
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(seed=5, top_p=0.9, max_tokens=8, ignore_eos=True),
    SamplingParams(seed=6, n=3, max_tokens=8, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=[20, 21, 22, 23], repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=8, min_tokens=4, bad_words=["a"], prompt_logprobs=1),
]


@pytest.fixture
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), num_gpu_blocks_override=200, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> LLM:
    """An undamaged model."""
    return LLM(str(tiny_llama), num_gpu_blocks_override=200, max_num_batched_tokens=64)


@contextmanager
def damaged(llm: LLM, token: int, number: float = torch.nan) -> Iterator[None]:
    row = llm.engine.executor.runner.model.embed.matrix.weight.data[token]  # type: ignore[attr-defined]
    before = row.clone()
    with torch.inference_mode():
        row[3] = number
    yield
    with torch.inference_mode():
        row.copy_(before)


def prompt(index: int, *, bad: bool) -> list[int]:
    tokens = [30 + (index * 17 + position * 5) % 60 for position in range(40)]
    return [*tokens[:25], BAD, *tokens[25:]] if bad else tokens


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_requests_with_nan_or_infinity_end_alone_and_leave_nothing_cached(
    llm: LLM, reference: LLM, number: float
) -> None:
    good, bad = [prompt(i, bad=False) for i in range(5)], [prompt(i, bad=True) for i in range(5)]
    expected = reference.generate([*good, *bad], PARAMS * 2, use_tqdm=False)
    with damaged(llm, BAD, number):
        prompts, params = [p for pair in zip(good, bad, strict=True) for p in pair], [p for p in PARAMS for _ in "ab"]
        mixed = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs for output in mixed[::2]] == [output.outputs for output in expected[:5]]
    for output in mixed[1::2]:
        assert output.finished
        assert all((c.finish_reason, c.text, c.token_ids) == (FinishReason.ERROR, "", []) for c in output.outputs)
    assert llm.engine.scheduler.num_corrupted == 5
    # Their blocks are not found in the prefix cache, and can be reused by others.
    after = llm.generate([*good, *bad], PARAMS * 2, use_tqdm=False)
    assert [output.outputs for output in after] == [output.outputs for output in expected]
    llm.engine.scheduler.check()


def test_a_request_that_fails_later_keeps_its_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [whole] = llm.generate([prompt(9, bad=False)], params, use_tqdm=False)
    tokens = whole.outputs[0].token_ids
    index = next(i for i in range(2, 12) if tokens[i] not in {*tokens[:i], *prompt(9, bad=False)})
    with damaged(llm, tokens[index]):
        [output] = llm.generate([prompt(9, bad=False)], params, use_tqdm=False)
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert output.outputs[0].token_ids == tokens[: index + 1]


def test_beams_with_nan_end_with_an_error(llm: LLM) -> None:
    with damaged(llm, BAD):
        [output] = llm.beam_search([prompt(3, bad=True)], BeamSearchParams(3, max_tokens=4))
    assert [beam.finish_reason for beam in output.sequences] == [FinishReason.ERROR] * 3
