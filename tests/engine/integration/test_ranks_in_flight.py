"""Ranks that share a model and launch a step before the previous one is read give the tokens of one step at a time.

Ranks are threads that keep sampled tokens as a device would. All ranks must communicate in the same order, which the
tests compare.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_engine import BeamSearchParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine
from stoker_engine.exec import build_runner as build_runner_module
from stoker_engine.exec.capture_agreement import CaptureError, agreed
from stoker_engine.exec.finish.sampling_graphs import SamplingGraphs
from stoker_engine.exec.graphs import StepGraphs
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.tokens.tokenizer import Tokenizer

from ...support.engine.device_steps import note_sampled, replayed
from ...support.engine.repeating_proposer import RepeatingProposer
from ...support.engine.thread_ranks import ThreadExecutor, ThreadRanks, thread_engine, thread_groups
from ...support.engine.tiny_models import save_model, tiny_llama_model
from .test_row_spaces import Captured
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
        groups = [engine.executor.groups[rank].tensor for rank in members]
        calls = [(ranks.calls, ranks.sizes) for ranks in groups if isinstance(ranks, ThreadRanks)]
        assert all(each == calls[0] for each in calls)


def args_of(model: Path, ranks: int, blocks: int = ROOMY, **options: Any) -> EngineArgs:
    options = {**SMALL, **options}
    return EngineArgs(str(model), device="cpu", num_gpu_blocks_override=blocks, tensor_parallel_size=ranks, **options)


def tokens_of(output: list[object]) -> list[object]:
    """Return the tokens and ends of an output, without log-probabilities, which are rounded differently if sums are
    split."""
    return [each[0] if isinstance(each, tuple) else each for each in output if not isinstance(each, str)]


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
    submitted = requests_with_grammars(random.Random(ranks), constraints(random.Random(ranks), 7))
    proposer, table, found = RepeatingProposer() if drafts else None, Tokenizer.load(model).token_table(), []
    for engines in (
        thread_engine(args_of(model, 1, max_model_len=320)),
        ranks_in_flight(args_of(model, ranks, 24, max_model_len=320), proposer),
    ):
        with engines as engine:
            engine.set_token_table(table)
            found.append(run_with_grammars(engine, submitted, random.Random(1)))
    alone, shared = ({key: tokens_of(output) for key, output in each.items()} for each in found)
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


def replay_steps(executor: ThreadExecutor) -> list[int]:
    """Have all ranks replay steps. Returns the padding of each step that the last rank replays from now on."""

    def capture(rank: int) -> None:
        runner, groups = executor.runners[rank], executor.groups[rank]
        with torch.inference_mode():
            build_runner_module._capture_graphs(runner, runner.inputs.device_batch, groups, lambda *_: None)

    with ThreadPoolExecutor(len(executor.runners)) as pool:
        list(pool.map(capture, range(len(executor.runners))))
    graphs, padding = executor.runners[-1].graphs, list[int]()
    assert graphs is not None
    find = graphs.find

    def noted(step: Any, has_adapters: bool) -> Any:
        graph = find(step, has_adapters)
        if graph is not None:
            padding.append(graph.shape.tokens - step.num_tokens)
        return graph

    graphs.find = noted  # type: ignore[method-assign]
    return padding


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_replayed_steps_of_ranks_give_the_tokens_of_one_rank(
    layout: dict[str, int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay is simulated: the ranks compute the step again, padded, from the same memory."""

    def capture_all(
        steps: StepGraphs, sampling: SamplingGraphs | None, planned_bytes: int, on_progress: Any, ranks: Any
    ) -> bool:
        steps.capture(agreed(replayed, ranks))
        if sampling is not None:
            sampling.capture(agreed(replayed, sampling.ranks))
        return True

    monkeypatch.setattr(build_runner_module, "attention_backend", lambda *_: Captured())
    monkeypatch.setattr(build_runner_module, "capture_all", capture_all)
    submitted = [each for each in requests(random.Random(9), 16) if not isinstance(each.params, BeamSearchParams)]
    args = args_of(model, 1, max_num_seqs=9)
    with thread_engine(args) as engine:
        expected = outputs(engine, submitted, random.Random(9))
    with ranks_in_flight(replace(args, **layout)) as engine:
        assert isinstance(engine.executor, ThreadExecutor)
        padding = replay_steps(engine.executor)
        sampled = note_sampled(engine.executor.runners[-1])
        found = outputs(engine, submitted, random.Random(9))
    assert {key: tokens_of(each) for key, each in found.items()} == {
        key: tokens_of(each) for key, each in expected.items()
    }
    assert len(padding) > 20 and set(padding) > {0}
    assert {each.draws for each in sampled} == ({False} if "tensor_parallel_size" in layout else {False, True})


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_capture_fails_on_all_ranks(failing: int) -> None:
    """At the same graph, so that no rank has a graph that others lack."""
    error = CaptureError("it synchronizes")
    groups, captured = thread_groups(RankLayout(tensor=3)), [0, 0, 0]

    def capture_on(rank: int) -> str:
        def capture(compute: Callable[[], torch.Tensor]) -> Any:
            if rank == failing and captured[rank] == 4:
                raise error
            return compute(), lambda: None

        agreeing = agreed(capture, groups[rank].engine)
        with pytest.raises(CaptureError) as raised:
            for _ in range(9):
                agreeing(lambda: torch.zeros(1))
                captured[rank] += 1
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        reasons = list(pool.map(capture_on, range(3)))
    assert captured == [4, 4, 4]
    assert [reason == str(error) for reason in reasons] == [rank == failing for rank in range(3)]
    assert all(reason == "another rank could not capture one" for reason in reasons if reason != str(error))
