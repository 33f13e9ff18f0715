"""Greedy tokens equal transformers', however the work is cut up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stoker_engine import LLM, SamplingParams
from stoker_engine.engine import Engine

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "blocks of 2": {"block_size": 2},
    "preempted": {"num_gpu_blocks_override": 16, "max_model_len": 160},
    "without prefix cache": {"enable_prefix_caching": False},
    "two at a time": {"max_num_seqs": 2},
}


@pytest.fixture(autouse=True)
def balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block pool balances after every step of every test here."""
    step = Engine.step

    def checked(engine: Engine) -> Any:
        deltas = step(engine)
        engine.scheduler.check()
        return deltas

    monkeypatch.setattr(Engine, "step", checked)


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 512) for _ in range(rng.randint(1, 100))] for _ in range(count)]


@pytest.mark.parametrize("way", WAYS)
def test_batch_equals_transformers(way: str, model: Path, assert_greedy: Any) -> None:
    llm = LLM(str(model), **{"num_gpu_blocks_override": 1024, **WAYS[way]})
    prompts = _prompts(8)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 48
        assert_greedy(model, prompt, output.outputs[0].token_ids)
    assert llm.engine.scheduler.kv.pool.num_free == llm.engine.runner.num_blocks
    assert (llm.engine.scheduler.num_preemptions > 0) == (way == "preempted")


def test_alone_equals_transformers(model: Path, assert_greedy: Any) -> None:
    llm = LLM(str(model), num_gpu_blocks_override=256)
    for prompt in _prompts(3, seed=1):
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert_greedy(model, prompt, output.outputs[0].token_ids)


def test_prefix_hits_equal_transformers(model: Path, assert_greedy: Any) -> None:
    llm = LLM(str(model), num_gpu_blocks_override=256)
    shared = _prompts(1, seed=2)[0] * 3
    prompts = [shared + tail for tail in _prompts(4, seed=3)]
    first = llm.generate(prompts[0], GREEDY, use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        assert output.num_cached_tokens >= len(shared) // 16 * 16
        assert_greedy(model, prompt, output.outputs[0].token_ids)


def test_a_prefix_that_is_new_is_computed_once_in_a_batch(model: Path, assert_greedy: Any) -> None:
    llm = LLM(str(model), num_gpu_blocks_override=256)
    shared = [random.Random(4).randrange(2, 512) for _ in range(128)]
    prompts = [[*shared, token] for token in range(2, 10)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0] + [128] * 7
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(model, prompt, output.outputs[0].token_ids)


def test_a_repeated_prompt_is_cached_but_for_its_last_block(model: Path) -> None:
    llm = LLM(str(model), num_gpu_blocks_override=256)
    prompt = [random.Random(5).randrange(2, 512) for _ in range(64)]
    once, again = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == 48  # the last token is always computed, and blocks are shared whole
    assert once.outputs[0].token_ids == again.outputs[0].token_ids
