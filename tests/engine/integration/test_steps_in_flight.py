"""Two steps in flight, and drafts, give bitwise equal tokens, log-probabilities and finish reasons."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stoker_engine import LLM, BeamSearchParams, SamplingParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.outputs import TokenDelta
from stoker_engine.engine import Engine
from stoker_engine.models.checkpoint import find_checkpoint

from ...support.engine.device_steps import engine_on_device
from ...support.engine.repeating_proposer import RepeatingProposer

SMALL: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 6, "dtype": "float32"}
SMALL |= {"long_prefill_token_threshold": 0}  # independent of measured times, for reproducible steps
ROOMY = 400  # blocks


def requests(rng: random.Random, count: int) -> list[EngineRequest]:
    """Return requests of all kinds; many share a prefix."""
    shared = [rng.randrange(5, 500) for _ in range(70)]
    made = []
    for index in range(count):
        prompt = shared[: rng.randrange(70)] + [rng.randrange(5, 500) for _ in range(rng.randrange(1, 40))]
        length = rng.randrange(1, 40)
        params: Any = rng.choice(
            [
                SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
                SamplingParams(temperature=0.8, seed=index, top_k=rng.choice((-1, 20)), max_tokens=length),
                SamplingParams(temperature=0, max_tokens=length, repetition_penalty=1.2, min_tokens=length // 2),
                SamplingParams(seed=index, n=rng.randrange(1, 4), max_tokens=length, logprobs=2),
                SamplingParams(seed=index, top_p=0.9, frequency_penalty=0.5, max_tokens=length),
                SamplingParams(temperature=0, max_tokens=length, prompt_logprobs=1, logit_bias={7: 3.0}),
                BeamSearchParams(rng.randrange(1, 4), max_tokens=length),
            ]
        )
        made.append(EngineRequest(str(index), prompt, params, length, seed=index, eos_token_ids=frozenset({1})))
    return made


def outputs(engine: Engine, submitted: list[EngineRequest], rng: random.Random) -> dict[tuple[str, int], list[object]]:
    """Run requests that arrive one after another; return results by request and sequence."""
    found: dict[tuple[str, int], list[object]] = {}
    waiting = list(submitted)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.8:
            engine.add(waiting.pop(0))
        for delta in engine.step().deltas:
            found.setdefault((delta.request_id, delta.index), []).extend(parts(delta))
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    return found


def parts(delta: TokenDelta) -> list[object]:
    logprobs = delta.logprobs or [None] * len(delta.token_ids)
    tokens = list(zip(delta.token_ids, map(repr, logprobs), strict=True))
    end = [delta.finish_reason, delta.stop_reason, delta.cumulative_logprob] if delta.finish_reason else []
    return [*map(repr, delta.prompt_logprobs or []), *tokens, *end]


@pytest.mark.parametrize(
    ("model", "blocks"), [("tiny_llama", ROOMY), ("tiny_llama", 18), ("tiny_gemma3", ROOMY), ("tiny_gemma3", 54)]
)
@pytest.mark.parametrize("how", ["in flight", "drafts", "both", "on a device", "drafts on a device"])
def test_steps_in_flight_and_drafts_change_no_output(
    how: str, model: str, blocks: int, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    seed = f"{how}{model}{blocks}"
    submitted = requests(random.Random(seed), 24)
    found = []
    with_drafts = how not in ("in flight", "on a device")
    for args, proposer in (
        ({}, None),
        ({"async_scheduling": how != "drafts"}, RepeatingProposer() if with_drafts else None),
    ):
        engine_args = EngineArgs(str(folder), num_gpu_blocks_override=blocks, **SMALL, **args)  # type: ignore[arg-type]
        if args and how.endswith("on a device"):
            engine = engine_on_device(engine_args, proposer)
        else:
            engine = Engine(engine_args, find_checkpoint(engine_args), proposer=proposer)
        found.append(outputs(engine, submitted, random.Random(seed)))
        preempted = engine.scheduler.num_preemptions
        assert (preempted > 0) == (blocks < ROOMY)
        engine.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("device", [False, True], ids=["thread", "device"])
def test_aborts_and_stops_in_flight_do_not_change_other_requests(device: bool, tiny_llama: Path) -> None:
    rng = random.Random(3)
    submitted = requests(rng, 40)
    alone = EngineArgs(str(tiny_llama), num_gpu_blocks_override=ROOMY, **SMALL)  # type: ignore[arg-type]
    expected = outputs(Engine(alone, find_checkpoint(alone)), submitted, rng)
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=20, async_scheduling=True, **SMALL)  # type: ignore[arg-type]
    engine = engine_on_device(args) if device else Engine(args, find_checkpoint(args))
    found: dict[tuple[str, int], list[object]] = {}
    ended, waiting = set(), list(submitted)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.6:
            engine.add(waiting.pop(0))
        if rng.random() < 0.2 and engine.scheduler.requests:
            victim = rng.choice(list(engine.scheduler.requests))
            ended.add(victim)
            engine.abort(victim) if rng.random() < 0.5 else engine.stop(victim, 0)
            engine.scheduler.check()
        for delta in engine.step().deltas:
            found.setdefault((delta.request_id, delta.index), []).extend(parts(delta))
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    survivors = {key: value for key, value in expected.items() if key[0] not in ended}
    assert len(survivors) > 10 and all(found[key] == value for key, value in survivors.items())


def test_a_row_of_an_aborted_sequence_does_not_get_its_token(tiny_llama: Path) -> None:
    """The next sequence in the row starts while a step that samples for the aborted one is in flight."""
    rng = random.Random(11)
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=ROOMY, **SMALL)  # type: ignore[arg-type]
    long = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    victim = EngineRequest("victim", [rng.randrange(5, 500) for _ in range(100)], long, 40)
    heir = EngineRequest("heir", [rng.randrange(5, 500) for _ in range(150)], long, 8)
    expected = outputs(Engine(args, find_checkpoint(args)), [heir], rng)
    for num_steps in range(3, 7):
        engine = engine_on_device(args)
        engine.add(victim)
        for _ in range(num_steps):
            engine.step()
        [sequence] = engine.scheduler.requests["victim"].live
        row = sequence.row
        engine.abort("victim")
        engine.add(heir)
        found: list[object] = []
        while engine.has_work:
            for delta in engine.step().deltas:
                found += parts(delta)
            if engine.scheduler.requests:
                assert [each.row for each in engine.scheduler.requests["heir"].live] == [row]
        assert found == expected["heir", 0]


def test_ctrl_c_during_a_step_caches_no_uncomputed_prefix(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_llama), num_gpu_blocks_override=ROOMY, **SMALL)  # type: ignore[arg-type]
    prompt = list(range(5, 120))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    forward, calls = runner.model.forward, []

    def interrupted(inputs: object) -> object:
        calls.append(inputs)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(inputs)

    monkeypatch.setattr(runner.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, params, use_tqdm=False)
    assert not llm.engine.has_work or not llm.engine.scheduler.has_work
    [after] = llm.generate(prompt, params, use_tqdm=False)
    fresh = LLM(str(tiny_llama), num_gpu_blocks_override=ROOMY, **SMALL)  # type: ignore[arg-type]
    [expected] = fresh.generate(prompt, params, use_tqdm=False)
    assert after.outputs == expected.outputs
    assert after.num_cached_tokens == 48  # only what the first step had computed


def test_a_second_ctrl_c_leaves_no_step_in_flight(tiny_llama: Path) -> None:
    args = EngineArgs(str(tiny_llama), num_gpu_blocks_override=ROOMY, async_scheduling=True, **SMALL)  # type: ignore[arg-type]
    engine = Engine(args, find_checkpoint(args))
    discard_in_flight, executor = engine.executor.discard_in_flight, engine.executor
    for request in requests(random.Random(5), 4):
        engine.add(request)
    engine.step()

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(executor, "collect", interrupted)
        patched.setattr(executor, "discard_in_flight", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    discard_in_flight()
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    while engine.has_work:
        assert engine.step().deltas == []
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_prompt_logprobs_are_complete_however_the_prompt_is_chunked(tiny_llama: Path, tokens: int) -> None:
    """Also if a chunk is a single token, alone or beside other sequences' decodes."""
    prompts = [list(range(5, 25)), list(range(30, 37)), list(range(40, 71))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    found = []
    for budget in (64, tokens):
        llm = LLM(str(tiny_llama), num_gpu_blocks_override=ROOMY, **{**SMALL, "max_num_batched_tokens": budget})  # type: ignore[arg-type]
        found.append(llm.generate(prompts, params, use_tqdm=False))
    for whole, cut in zip(*found, strict=True):
        assert cut.outputs == whole.outputs
        assert cut.prompt_logprobs == whole.prompt_logprobs and len(whole.prompt_logprobs or []) == len(
            whole.prompt_token_ids
        )
