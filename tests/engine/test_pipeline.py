"""A pipeline's stages together answer as one process does: what only stages could break."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine

from .exec.test_rank_executor import TIGHT, _check_alike, _requests, _run
from .thread_ranks import thread_engine

ROOMY: dict[str, Any] = {"max_model_len": 192, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 48}


@pytest.mark.parametrize(
    ("model", "tensor", "options"),
    [
        ("tiny_llama", 1, TIGHT),
        ("tiny_llama", 1, {**ROOMY, "async_scheduling": True}),
        ("tiny_llama", 2, {**TIGHT, "async_scheduling": True}),
        ("tiny_gemma3", 1, {**TIGHT, "num_gpu_blocks_override": 60}),
    ],
)
def test_two_stages_answer_as_one(
    model: str, tensor: int, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    args = EngineArgs(str(folder), dtype="float32", device="cpu", **options)
    requests = _requests(random.Random(tensor).randrange(1000))
    theirs, _ = _run(Engine.from_args(args), requests)
    with thread_engine(replace(args, tensor_parallel_size=tensor, pipeline_parallel_size=2)) as engine:
        ours, preempted = _run(engine, requests)
        assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    assert _check_alike(ours, theirs) > 0.9 * len(ours)
    assert (preempted > 0) == (options["num_gpu_blocks_override"] < 400)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stages_that_are_processes(tensor: int, tiny_llama: Path) -> None:
    args = EngineArgs(str(tiny_llama), dtype="float32", device="cpu", **TIGHT)
    requests = _requests(5)
    theirs, _ = _run(Engine.from_args(args), requests)
    engine = Engine.from_args(replace(args, tensor_parallel_size=tensor, pipeline_parallel_size=2))
    try:
        ours, _ = _run(engine, requests)
    finally:
        engine.shutdown()
    assert _check_alike(ours, theirs) > 0.9 * len(ours)
