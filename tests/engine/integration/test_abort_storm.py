"""Requests come and go while blocks are scarce: the pool balances after every step, and survivors are exact."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stoker_engine import LLM, BeamSearchParams, SamplingParams
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.tokens.input_processor import InputProcessor


def _asked(inputs: InputProcessor, rng: random.Random, count: int) -> list[EngineRequest]:
    shared = [rng.randrange(2, 512) for _ in range(40)]
    requests = []
    for index in range(count):
        prompt = shared[: rng.choice([0, 20, 40])] + [rng.randrange(2, 512) for _ in range(rng.randint(1, 40))]
        params: SamplingParams | BeamSearchParams = SamplingParams(
            temperature=0, max_tokens=rng.randint(1, 40), ignore_eos=True, n=rng.choice([1, 1, 1, 2])
        )
        if index % 20 == 0:
            params = BeamSearchParams(beam_width=2, max_tokens=8)
        requests.append(inputs.request(str(index), prompt, params))
    return requests


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma3"])
def test_survivors_of_an_abort_storm_are_exact(model: str, request: pytest.FixtureRequest, assert_greedy: Any) -> None:
    folder: Path = request.getfixturevalue(model)
    llm = LLM(str(folder), num_gpu_blocks_override=60, max_model_len=128, max_num_seqs=32, max_num_batched_tokens=64)
    rng = random.Random(0)
    waiting = _asked(InputProcessor(llm.engine.info, llm.tokenizer), rng, 200)
    prompts = {submitted.id: submitted.prompt_token_ids for submitted in waiting}
    outputs: dict[tuple[str, int], list[int]] = {}
    running, aborted, finished = set[str](), set[str](), set[tuple[str, int]]()
    while waiting or llm.engine.has_work:
        for _ in range(rng.randrange(6)):
            if waiting:
                submitted = waiting.pop()
                llm.engine.add(submitted)
                running.add(submitted.id)
        if running and rng.random() < 0.35:
            victim = rng.choice(sorted(running))
            running.discard(victim)
            aborted.add(victim)
            llm.engine.abort(victim)
            llm.engine.scheduler.check()
        for delta in llm.engine.step().deltas:
            assert delta.request_id not in aborted
            outputs.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                finished.add((delta.request_id, delta.index))
        running = {name for name in running if name in llm.engine.scheduler.requests}
        llm.engine.scheduler.check()

    scheduler = llm.engine.scheduler
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert scheduler.num_preemptions > 20 and 40 < len(aborted) < 160
    survivors = [key for key in finished if key[0] not in aborted and int(key[0]) % 20]
    assert len(survivors) > 60
    for name, index in rng.sample(sorted(survivors), 40):
        assert_greedy(folder, prompts[name], outputs[name, index])
