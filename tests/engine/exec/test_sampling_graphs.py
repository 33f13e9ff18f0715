"""Sampling by graphs gives the tokens of sampling kernel by kernel. A replay is simulated by computing again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_engine import SamplingParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.engine import Engine
from stoker_engine.exec.runner import Runner
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.sizing import step_shapes

from ...support.engine.device_steps import engine_on_device, sample_by_graphs
from ...support.engine.repeating_proposer import RepeatingProposer
from ..integration.test_steps_in_flight import SMALL, outputs, requests

#: The largest graph has fewer rows than the largest step.
SIZES = (1, 2, 4)
#: The token whose embedding is damaged.
DAMAGED = 7
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0},),
    "drawn": ({"temperature": 0.9, "top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {}),
    "mixed": ({"temperature": 0}, {"temperature": 1.3, "top_p": 0.9, "top_k": 50}),
}
DRAWS = {"greedy": {False}, "drawn": {True}, "mixed": {False, True}}


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_shapes, "_SAMPLED_ROWS", SIZES)


def runner_of(engine: Engine) -> Runner:
    runner = engine.executor.runner  # type: ignore[attr-defined]
    assert isinstance(runner, Runner)
    return runner


def requests_of(kind: str) -> list[EngineRequest]:
    """Return six requests, which end one after another."""
    rng, made = random.Random(kind), list[EngineRequest]()
    for index in range(6):
        options, length = KINDS[kind][index % len(KINDS[kind])], 3 + 2 * index
        params = SamplingParams(seed=index, max_tokens=length, ignore_eos=True, **options)
        prompt = [rng.randrange(10, 500) for _ in range(rng.randrange(1, 8))]
        made.append(EngineRequest(str(index), prompt, params, length, seed=index))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_without_graphs(kind: str, tiny_llama: Path) -> None:
    """Sequences begin and end one after another, so steps have 1 to 6 rows, and padding is rows of earlier steps."""
    args, submitted = EngineArgs(str(tiny_llama), num_gpu_blocks_override=400, **SMALL), requests_of(kind)
    expected = outputs(Engine(args, find_checkpoint(args)), submitted, random.Random(1))
    engine = engine_on_device(args)
    sampled = sample_by_graphs(runner_of(engine))
    assert outputs(engine, submitted, random.Random(1)) == expected
    assert {each[:2] for each in sampled} == {(1, 1), (2, 2), (3, 4), (4, 4)}
    assert {each.draws for each in sampled} == DRAWS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_nan_ends_alone_and_leaves_no_trace_in_graphs(kind: str, tiny_llama: Path) -> None:
    """Afterwards its row is padding, or another sequence's."""
    args, submitted = EngineArgs(str(tiny_llama), num_gpu_blocks_override=400, **SMALL), requests_of(kind)
    submitted[2] = replace(submitted[2], prompt_token_ids=[DAMAGED])
    found = []
    for has_graphs in (False, True):
        engine = engine_on_device(args)
        runner = runner_of(engine)
        with torch.inference_mode():
            runner.model.embed.matrix.weight.data[DAMAGED, 3] = torch.nan  # type: ignore[attr-defined]
        sampled = sample_by_graphs(runner) if has_graphs else []
        found.append(outputs(engine, submitted, random.Random(2)))
        assert engine.scheduler.num_corrupted == 1
    assert found[0] == found[1]
    assert found[0]["2", 0][0] is FinishReason.ERROR
    assert len(sampled) > 5


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_of_all_kinds_have_the_outputs_without_graphs(drafts: bool, tiny_llama: Path) -> None:
    """Penalties, beams, log-probabilities, several sequences and drafts are sampled without graphs, in between; rows
    are preempted, and pass to other sequences while a step is in flight."""
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=18, **SMALL)
    submitted = requests(random.Random(17), 24)
    expected = outputs(Engine(args, find_checkpoint(args)), submitted, random.Random(18))
    engine = engine_on_device(args, RepeatingProposer() if drafts else None)
    sampled = sample_by_graphs(runner_of(engine))
    assert outputs(engine, submitted, random.Random(18)) == expected
    assert {each.draws for each in sampled} == {False, True}


@pytest.mark.parametrize("has_adapters", [False, True])
def test_steps_with_adapters_are_sampled_without_graphs(has_adapters: bool, tiny_llama: Path) -> None:
    """The head may have an adapter."""
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=400, **SMALL)
    engine = engine_on_device(args)
    runner = runner_of(engine)
    sampled, begin = sample_by_graphs(runner), runner.rows.begin
    runner.rows.begin = lambda tokens, kept, _: begin(tokens, kept, has_adapters)  # type: ignore[method-assign]
    outputs(engine, requests_of("greedy"), random.Random(3))
    assert bool(sampled) != has_adapters
