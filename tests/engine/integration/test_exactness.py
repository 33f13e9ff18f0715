"""Greedy tokens equal transformers', and logprobs its log-softmax, however the work is split."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stoker_engine import LLM, BeamSearchParams, SamplingParams
from stoker_engine.core.outputs import RequestOutput
from stoker_engine.engine import Engine
from stoker_engine.tokens.input_processor import InputProcessor

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2)

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "blocks of 2": {"block_size": 2},
    "preempted": {"num_gpu_blocks_override": 36, "max_model_len": 160, "max_num_batched_tokens": 64},
    "without prefix cache": {"enable_prefix_caching": False},
    "two at a time": {"max_num_seqs": 2},
}
TIE = 1e-3


@pytest.fixture(autouse=True)
def balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the block pool balances after every step of these tests."""
    step = Engine.step

    def checked(engine: Engine) -> Any:
        outputs = step(engine)
        engine.scheduler.check()
        return outputs

    monkeypatch.setattr(Engine, "step", checked)


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 512) for _ in range(rng.randint(1, 100))] for _ in range(count)]


def _llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), **{"num_gpu_blocks_override": 2048, **options})


def _assert_reference(reference: Any, output: RequestOutput) -> None:
    """Assert that each token is the reference's argmax (except for ties), and each logprob its log-softmax."""
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    assert completion.logprobs is not None
    for row, token, position in zip(logprobs, completion.token_ids, completion.logprobs, strict=True):
        best = row.topk(2)
        if int(best.indices[0]) != token:
            assert best.values[0] - row[token] <= TIE
            return  # a tie: later tokens may differ
        assert next(iter(position)) == token and position[token].rank == 1
        for candidate, reported in position.items():
            assert abs(reported.logprob - float(row[candidate])) < 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_batch_equals_transformers(way: str, model: Path, reference: Any) -> None:
    llm = _llm(model, **WAYS[way])
    outputs = llm.generate(_prompts(8), GREEDY, use_tqdm=False)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 48
        _assert_reference(reference, output)
    scheduler = llm.engine.scheduler
    assert scheduler.kv.pool.num_free == llm.engine.info.usable_blocks
    assert (scheduler.num_preemptions > 0) == (way == "preempted")


def test_alone_equals_transformers(model: Path, reference: Any) -> None:
    llm = _llm(model)
    for prompt in _prompts(3, seed=1):
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        _assert_reference(reference, output)


def test_prefix_hits_equal_transformers(model: Path, reference: Any) -> None:
    llm = _llm(model)
    shared = _prompts(1, seed=2)[0] * 3
    prompts = [shared + tail for tail in _prompts(4, seed=3)]
    first = llm.generate(prompts[0], GREEDY, use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        assert output.num_cached_tokens >= len(shared) // 16 * 16
        _assert_reference(reference, output)


def test_a_new_prefix_is_computed_once_in_a_batch(model: Path, reference: Any) -> None:
    llm = _llm(model)
    shared = [random.Random(4).randrange(2, 512) for _ in range(128)]
    prompts = [[*shared, token] for token in range(2, 10)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0] + [128] * 7
    for output in outputs:
        _assert_reference(reference, output)


def test_a_repeated_prompt_is_cached_except_for_its_last_block(model: Path) -> None:
    llm = _llm(model)
    prompt = [random.Random(5).randrange(2, 512) for _ in range(64)]
    once, again = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == 48  # the last token is always computed, and only full blocks are shared
    assert once.outputs[0].token_ids == again.outputs[0].token_ids


@pytest.mark.parametrize("way", ["whole", "chunks of 16", "preempted"])
def test_prompt_logprobs_equal_transformers(way: str, model: Path, reference: Any) -> None:
    llm = _llm(model, **WAYS[way])
    prompts = _prompts(4, seed=6)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    for _ in range(2):  # the second time a cached prefix exists, but must not be used
        for output in llm.generate(prompts, params, use_tqdm=False):
            reported = output.prompt_logprobs
            assert reported is not None and reported[0] is None and len(reported) == len(output.prompt_token_ids)
            with torch.inference_mode():
                logprobs = reference(torch.tensor([output.prompt_token_ids])).logits[0].log_softmax(-1)
            for index, token in enumerate(output.prompt_token_ids[1:]):
                position = reported[index + 1]
                assert position is not None and next(iter(position)) == token
                assert {int(i) for i in logprobs[index].topk(2).indices} <= set(position)
                assert all(abs(p.logprob - float(logprobs[index, t])) < 1e-4 for t, p in position.items())


@pytest.mark.parametrize("way", ["whole", "chunks of 16", "preempted", "two at a time"])
def test_n_sequences_equal_n_requests(way: str, model: Path) -> None:
    """Sequence i of n uses seed + i: the same tokens as a separate request with that seed."""
    llm = _llm(model, **WAYS[way])
    prompts = _prompts(3, seed=7)
    together = llm.generate(
        prompts, SamplingParams(n=4, seed=12, temperature=4, max_tokens=24, ignore_eos=True), use_tqdm=False
    )
    alone = _llm(model)
    for index in range(4):
        params = SamplingParams(seed=12 + index, temperature=4, max_tokens=24, ignore_eos=True)
        for prompt, output in zip(prompts, together, strict=True):
            [single] = alone.generate(prompt, params, use_tqdm=False)
            assert output.outputs[index].token_ids == single.outputs[0].token_ids
    assert len({tuple(o.token_ids) for o in together[0].outputs}) == 4


PLAIN = {"length_penalty": 1.0, "early_stopping": False}


@pytest.mark.parametrize(
    ("way", "options"),
    [
        *((way, PLAIN) for way in ("whole", "chunks of 16", "blocks of 2", "preempted", "two at a time")),
        ("whole", {"length_penalty": 0.3, "early_stopping": True}),
        ("whole", {"length_penalty": 1.7, "early_stopping": "never"}),
        ("preempted", {"length_penalty": -0.5, "early_stopping": False}),
    ],
    ids=str,
)
def test_beams_equal_transformers(way: str, options: dict[str, Any], model: Path, reference: Any) -> None:
    width = 2 if way == "two at a time" else 4
    llm = _llm(model, **{**WAYS[way], "num_gpu_blocks_override": 160 if way == "preempted" else 2048})
    llm.engine.info = _with_more_ends(llm, 40)
    llm._inputs = InputProcessor(llm.engine.info, llm.tokenizer)
    prompts = [prompt[:40] for prompt in _prompts(3, seed=8)]
    found = llm.beam_search(prompts, BeamSearchParams(width, max_tokens=20, **options))
    for prompt, output in zip(prompts, found, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=sorted(llm.engine.info.eos_token_ids),
            pad_token_id=2,
            **options,
        )
        ours = [beam.tokens for beam in output.sequences]
        assert [t[: len(o)] for t, o in zip(theirs.tolist(), ours, strict=True)] == ours
        assert all(set(t[len(o) :]) <= {2} for t, o in zip(theirs.tolist(), ours, strict=True))


def _with_more_ends(llm: LLM, count: int) -> Any:
    """A random model rarely generates its end token; with many end tokens, beams do end."""
    return dataclasses.replace(llm.engine.info, eos_token_ids=tuple(range(3, 3 + count)))
