"""A model computed by ranks gives the results of one process: real ranks, tiny models, all kinds of requests.

Other tests compare the single process with transformers; here greedy outputs are compared with it too. Sums of ranks
are rounded differently, so a token may differ if the two best are almost equally likely, and then also later tokens.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from stoker_common.errors import EngineDeadError
from stoker_engine import SamplingParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.sampling_params import BeamSearchParams
from stoker_engine.engine import Engine
from stoker_engine.exec.rank_executor import RankExecutor
from stoker_engine.models.checkpoint import find_checkpoint

from ...support.engine.tiny_models import save_model
from ...support.waiting import until
from ..conftest import AssertGreedy

SIZE = 2
#: By kind of model: options that cause chunked prompts and preemptions.
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"async_scheduling": True},
    "gemma": {"num_gpu_blocks_override": 60},  # three groups of layers
    "mixtral": {},
}
TIGHT: dict[str, Any] = {
    "max_model_len": 192,
    "num_gpu_blocks_override": 18,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 12,
    "long_prefill_token_threshold": 24,
}
#: Tolerance of log-probabilities; two tokens closer than this may be swapped.
NEAR = 1e-4


@dataclass
class Output:
    """The output of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None


Outputs = dict[tuple[str, int], Output]


@pytest.fixture(scope="module")
def tiny_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=511,  # odd: the last rank has one row less
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,  # held by both ranks
        num_local_experts=4,
        sliding_window=None,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return save_model(tmp_path_factory.mktemp("tiny-mixtral"), MixtralForCausalLM(config).float().eval())


def _args(model: Path, **options: Any) -> EngineArgs:
    return EngineArgs(str(model), dtype="float32", device="cpu", **{**TIGHT, **options})


def _ranks(args: EngineArgs, size: int = SIZE) -> Engine:
    return Engine.from_args(replace(args, tensor_parallel_size=size))


def _run(
    engine: Engine, requests: list[EngineRequest], then: dict[int, Callable[[], None]] | None = None
) -> tuple[Outputs, int]:
    """Run all requests, the second half of which arrive later; return outputs and the number of preemptions.

    Args:
        then: functions that are called before the steps with these numbers.
    """
    found: Outputs = {}
    half = len(requests) // 2
    before = engine.scheduler.stats().num_preemptions
    for request in requests[:half]:
        engine.add(request)
    step = 0
    while engine.has_work or step < 12:
        step += 1
        if step == 12:
            for request in requests[half:]:
                engine.add(request)
        if then and step in then:
            then[step]()
        for delta in engine.step().deltas:
            output = found.setdefault((delta.request_id, delta.index), Output())
            output.token_ids += delta.token_ids
            output.logprobs += delta.logprobs or []
            output.prompt_logprobs += delta.prompt_logprobs or []
            output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
            output.cumulative_logprob = delta.cumulative_logprob
            output.finish_reason = delta.finish_reason
    return found, engine.scheduler.stats().num_preemptions - before


def _requests(seed: int) -> list[EngineRequest]:
    """Return prompts with lengths around blocks, chunks and steps; half of them share a prefix."""
    chance = random.Random(seed)
    begin = [chance.randrange(2, 500) for _ in range(40)]
    requests = []
    for number, length in enumerate([1, 2, 15, 16, 17, 23, 24, 25, 47, 48, 49, 70, 3, 33, 64, 90] * 2):
        prompt = [chance.randrange(2, 500) for _ in range(length)]
        if number % 2:
            prompt = [*begin, *prompt[: length // 2]]
        params = [
            SamplingParams(temperature=0, logprobs=3),
            SamplingParams(temperature=0, logprobs=3, ignore_eos=True, prompt_logprobs=2),
            SamplingParams(n=3, temperature=0.8, top_k=50, seed=number, logprobs=1),
            BeamSearchParams(beam_width=3),
            SamplingParams(temperature=0, logprobs=3, repetition_penalty=1.2, presence_penalty=0.5),
        ][number % 5]
        requests.append(EngineRequest(f"{number}", prompt, params, chance.randrange(4, 40), number, frozenset({1})))
    return requests


def _check_alike(found: Outputs, expected: Outputs, near: float = NEAR) -> int:
    """Assert that outputs are equal, except for near ties.

    Args:
        near: tolerance of log-probabilities.

    Returns:
        Number of sequences that are equal until their end.
    """
    assert found.keys() == expected.keys()
    whole = 0
    for key, mine in found.items():
        reference = expected[key]
        _check_logprobs(mine.prompt_logprobs, reference.prompt_logprobs, near)
        if mine.token_ids == reference.token_ids:
            _check_logprobs(mine.logprobs, reference.logprobs, near)
            assert mine.finish_reason == reference.finish_reason
            if mine.cumulative_logprob is not None:
                assert reference.cumulative_logprob is not None
                assert abs(mine.cumulative_logprob - reference.cumulative_logprob) <= near * len(mine.token_ids)
            whole += 1
            continue
        assert mine.logprobs, f"{key}: {mine} is not {reference}"
        pairs = zip(mine.token_ids, reference.token_ids, strict=False)
        apart = next(i for i, (a, b) in enumerate(pairs) if a != b)
        _check_logprobs(mine.logprobs[:apart], reference.logprobs[:apart], near)
        there = dict(zip(reference.logprobs[apart].token_ids, reference.logprobs[apart].logprobs, strict=True))
        assert abs(there[mine.token_ids[apart]] - there[reference.token_ids[apart]]) <= near, f"{key}, token {apart}"
    return whole


def _check_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs], near: float = NEAR) -> None:
    for mine, reference in zip(found, expected, strict=True):
        assert mine.token_ids[0] == reference.token_ids[0]
        for a, b in zip(mine.logprobs, reference.logprobs, strict=True):
            assert abs(a - b) <= near


@pytest.fixture(
    scope="module",
    params=["llama", pytest.param("gemma", marks=pytest.mark.slow), pytest.param("mixtral", marks=pytest.mark.slow)],
)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Engine, Engine]]:
    """A model, an engine with ranks, and one of this process alone."""
    name = {"llama": "tiny_llama", "gemma": "tiny_gemma3", "mixtral": "tiny_mixtral"}[request.param]
    args = _args(model := request.getfixturevalue(name), **OPTIONS[request.param])
    ranks = _ranks(args)
    yield model, ranks, Engine(args, find_checkpoint(args))
    ranks.shutdown()


def test_ranks_give_the_outputs_of_one_process(pair: tuple[Path, Engine, Engine], assert_greedy: AssertGreedy) -> None:
    model, ranks, alone = pair
    requests = _requests(1)
    found, preempted = _run(ranks, requests)
    expected, _ = _run(alone, requests)
    assert _check_alike(found, expected) > 0.9 * len(found)
    assert preempted > 0
    assert any(output.num_cached_tokens for output in found.values())
    for request in requests:
        if request.params == SamplingParams(temperature=0, logprobs=3):
            assert_greedy(model, request.prompt_token_ids, found[request.id, 0].token_ids)


def test_aborts_do_not_change_other_requests(pair: tuple[Path, Engine, Engine]) -> None:
    _, ranks, alone = pair
    requests = _requests(2)
    chance = random.Random(2)
    aborted = chance.sample([request.id for request in requests], 8)
    then = {
        chance.randrange(2, 40): lambda ids=aborted[i : i + 2]: [ranks.abort(id) for id in ids] and None
        for i in range(0, 8, 2)
    }
    found, _ = _run(ranks, requests, then)
    expected, _ = _run(alone, requests)
    survivors = {key: output for key, output in found.items() if key[0] not in aborted}
    _check_alike(survivors, {key: output for key, output in expected.items() if key[0] not in aborted})
    assert not ranks.has_work


def test_repeated_requests_give_bitwise_equal_outputs(pair: tuple[Path, Engine, Engine]) -> None:
    """In other batches too: the same requests one by one, with and without prefix cache."""
    _, ranks, _ = pair
    requests = [request for request in _requests(3)[:10] if isinstance(request.params, SamplingParams)]
    together, _ = _run(ranks, requests)
    one_by_one: Outputs = {}
    for request in requests:
        ranks.add(request)
        one_by_one |= _run(ranks, [])[0]
    for key, output in together.items():
        assert output.token_ids == one_by_one[key].token_ids
        assert output.logprobs == one_by_one[key].logprobs


class _KnownOutputs:
    """Proposes the earlier output of the same prompts, sometimes with an error."""

    def __init__(self, known: list[list[int]]) -> None:
        self._known, self._chance, self.proposed = known, random.Random(5), 0

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        so_far = list(token_ids)
        for known in self._known:
            if known[: len(so_far)] == so_far:
                draft = known[len(so_far) :][: min(max_tokens, 4)]
                if draft and self._chance.random() < 0.3:
                    draft[self._chance.randrange(len(draft))] = 7
                self.proposed += len(draft)
                return draft
        return []


def test_drafts_do_not_change_outputs(pair: tuple[Path, Engine, Engine]) -> None:
    model, ranks, _ = pair
    requests = [request for request in _requests(4) if isinstance(request.params, SamplingParams)][:12]
    plain, _ = _run(ranks, requests)
    prompts = {request.id: request.prompt_token_ids for request in requests}
    proposer = _KnownOutputs([prompts[id] + output.token_ids for (id, _), output in plain.items()])
    args = _args(model)
    drafted, _ = _run(Engine(args, find_checkpoint(args), executor=ranks.executor, proposer=proposer), requests)
    assert proposer.proposed > 50
    for key, output in plain.items():
        assert drafted[key].token_ids == output.token_ids
        _check_logprobs(drafted[key].logprobs, output.logprobs)


def test_every_rank_caches_its_share_of_heads(pair: tuple[Path, Engine, Engine]) -> None:
    _, ranks, alone = pair
    found, whole = ranks.executor.plan, alone.executor.plan
    assert (found.num_blocks, found.max_model_len) == (whole.num_blocks, whole.max_model_len)
    kept = [sum(group.bytes_per_token for group in plan.groups) for plan in (found, whole)]
    heads = alone.executor.runner.model.config.layers[0].attention.num_kv_heads  # type: ignore[attr-defined]
    assert kept[0] * heads == kept[1] * -(-heads // SIZE)


@pytest.mark.parametrize(
    "signum, rank, seed",
    [
        (signal.SIGKILL, 1, 0),
        *(
            pytest.param(signum, rank, seed, marks=pytest.mark.slow)
            for seed, (signum, rank) in enumerate([(signal.SIGKILL, 0), (signal.SIGSTOP, 0), (signal.SIGSTOP, 1)], 1)
        ),
    ],
)
def test_a_rank_killed_or_stopped_at_any_moment_is_named(
    signum: signal.Signals, rank: int, seed: int, tiny_llama: Path
) -> None:
    chance = random.Random(seed)
    engine = _ranks(_args(tiny_llama, async_scheduling=bool(seed % 2)))
    assert isinstance(engine.executor, RankExecutor)
    processes = engine.executor._ranks
    threading.Timer(chance.random(), os.kill, (processes[rank].pid, signum)).start()
    words = "SIGKILL" if signum == signal.SIGKILL else "was stopped"
    with pytest.raises(EngineDeadError, match=f"rank {rank} of {SIZE} .*{words}"):
        while True:
            _run(engine, _requests(chance.randrange(1000)))
    until(lambda: not any(psutil.pid_exists(process.pid) for process in processes), "all ranks have ended")
    engine.shutdown()
