"""Ranks that share a model and launch a step before the previous one is read give the tokens of one step at a time.

Ranks are threads that keep sampled tokens as a device would. All ranks must communicate in the same order, which the
tests compare.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.tokens.tokenizer import Tokenizer

from ...support.engine.repeating_proposer import RepeatingProposer
from ...support.engine.thread_ranks import ThreadExecutor, ThreadRanks, thread_engine
from ...support.engine.tiny_models import save_model, tiny_llama_model
from .test_steps_in_flight import SMALL, outputs, parts, requests
from .test_structured_outputs import constraints
from .test_structured_outputs import requests as requests_with_grammars
from .test_structured_outputs import run as run_with_grammars

ROOMY, SCARCE = 400, 18  # blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that four ranks can share."""
    return save_model(tmp_path_factory.mktemp("model"), tiny_llama_model(num_key_value_heads=4))


@contextmanager
def ranks_in_flight(args: EngineArgs, proposer: Any = None) -> Iterator[Engine]:
    """Create an engine with two steps in flight on each rank. Afterwards, assert that all ranks of a group have
    communicated in the same order."""
    with thread_engine(replace(args, async_scheduling=True), proposer=proposer, on_device=True) as engine:
        yield engine
    assert isinstance(engine.executor, ThreadExecutor)
    for members in RankLayout.of(args).tensor_groups():
        first, *others = (engine.executor.groups[rank].tensor for rank in members)
        assert isinstance(first, ThreadRanks) and first.calls
        for other in others:
            assert isinstance(other, ThreadRanks)
            assert (other.calls, other.sizes) == (first.calls, first.sizes)


def args_of(model: Path, ranks: int, blocks: int = ROOMY) -> EngineArgs:
    return EngineArgs(str(model), device="cpu", num_gpu_blocks_override=blocks, tensor_parallel_size=ranks, **SMALL)


@pytest.mark.parametrize(
    ("ranks", "blocks", "drafts"), [(2, ROOMY, False), (2, SCARCE, False), (2, SCARCE, True), (4, SCARCE, False)]
)
def test_two_steps_in_flight_change_no_output(ranks: int, blocks: int, drafts: bool, model: Path) -> None:
    """Of requests of all kinds: greedy, drawn, penalised, beams, several sequences, log-probabilities."""
    seed = f"{ranks}{blocks}{drafts}"
    args, submitted = args_of(model, ranks, blocks), requests(random.Random(seed), 24)
    with thread_engine(args) as engine:
        expected = outputs(engine, submitted, random.Random(seed))
    with ranks_in_flight(args, RepeatingProposer() if drafts else None) as engine:
        assert outputs(engine, submitted, random.Random(seed)) == expected
        assert (engine.scheduler.num_preemptions > 0) == (blocks < ROOMY)


@pytest.mark.parametrize(("ranks", "drafts"), [(2, False), (2, True), (4, False)])
def test_grammars_and_penalties_give_the_tokens_of_one_rank(ranks: int, drafts: bool, model: Path) -> None:
    """Their sequences are sampled once the previous tokens are read, on all ranks at the same place."""
    submitted = requests_with_grammars(random.Random(ranks), constraints(random.Random(ranks), 12))
    found = []
    for args, proposer in (
        (args_of(model, 1), None),
        (args_of(model, ranks, 40), RepeatingProposer() if drafts else None),
    ):
        engines = thread_engine(args) if len(found) == 0 else ranks_in_flight(args, proposer)
        with engines as engine:
            engine.set_token_table(Tokenizer.load(model).token_table())
            found.append(run_with_grammars(engine, submitted, random.Random(1)))
    # Log-probabilities are rounded differently if a sum is split.
    alone, shared = (
        {key: [each[0] if isinstance(each, tuple) else each for each in output] for key, output in each.items()}
        for each in found
    )
    assert shared == alone


def test_aborts_and_stops_in_flight_do_not_change_other_requests(model: Path) -> None:
    rng = random.Random(3)
    args, submitted = args_of(model, 2, SCARCE), requests(rng, 30)
    with thread_engine(args) as engine:
        expected = outputs(engine, submitted, random.Random(4))
    found: dict[tuple[str, int], list[object]] = {}
    ended, waiting = set(), list(submitted)
    with ranks_in_flight(args) as engine:
        while waiting or engine.has_work:
            if waiting and rng.random() < 0.6:
                engine.add(waiting.pop(0))
            if rng.random() < 0.2 and engine.scheduler.requests:
                victim = rng.choice(list(engine.scheduler.requests))
                ended.add(victim)
                engine.abort(victim) if rng.random() < 0.5 else engine.stop(victim, 0)
            for delta in engine.step().deltas:
                found.setdefault((delta.request_id, delta.index), []).extend(parts(delta))
    survivors = {key: value for key, value in expected.items() if key[0] not in ended}
    assert len(survivors) > 8 and all(found[key] == value for key, value in survivors.items())


def test_steps_in_flight_are_discarded_on_all_ranks(model: Path) -> None:
    """Afterwards the same requests give the same outputs."""
    args, submitted = args_of(model, 2), requests(random.Random(5), 6)
    with thread_engine(args) as engine:
        expected = outputs(engine, submitted, random.Random(6))
    with ranks_in_flight(args) as engine:
        for request in requests(random.Random(7), 6):
            engine.add(request)
        for _ in range(3):
            engine.step()
        engine._discard_in_flight()
        for request_id in list(engine.scheduler.requests):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        assert outputs(engine, submitted, random.Random(6)) == expected
