"""A model that several ranks share answers as one process does, whatever the layout.

Of one process, what is right is tested elsewhere against transformers.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine

from .exec.test_rank_executor import TIGHT, _check_alike, _requests, _run
from .thread_ranks import thread_engine


@pytest.mark.parametrize("tensor", [2, 4])
def test_the_same_comes_out(tensor: int, tiny_llama: Path) -> None:
    args = EngineArgs(str(tiny_llama), dtype="float32", device="cpu", **TIGHT)
    requests = _requests(random.Random(tensor).randrange(1000))
    theirs, _ = _run(Engine.from_args(args), requests)
    with thread_engine(replace(args, tensor_parallel_size=tensor)) as engine:
        ours, preempted = _run(engine, requests)
    assert _check_alike(ours, theirs) > 0.9 * len(ours)
    assert preempted > 0
