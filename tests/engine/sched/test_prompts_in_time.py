"""Streams beside long prompts, in virtual time: gaps between tokens, and the prompt's time to first token.

Steps of a simulated processor take the time given by one of `PROCESSORS`, which the scheduler gets like an engine's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from stoker_engine.core.step import Sampled, StepResult
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.scheduled import Scheduled
from stoker_engine.sched.scheduler import Scheduler
from stoker_engine.sched.step_budget import DECODE_STEPS
from stoker_engine.sched.step_cost import REACH, Estimate, StepCost, StepWork

from .fake_model import FULL, sampling

Takes = Callable[[StepWork], float]

BLOCK = 4
STEP = 512  # tokens

#: Seconds of a step: n prompt tokens, p pairs of query and key, d decodes.
PROCESSORS: dict[str, Takes] = {
    "few cores": lambda work: 0.05 + 0.0047 * work.num_prompt_tokens + 0.002 * work.num_decodes,
    "slow long contexts": lambda work: 0.01 + 1e-4 * work.num_prompt_tokens + 2e-7 * work.num_pairs,
    "reads beside computation": lambda work: max(0.03, 0.001 * (work.num_prompt_tokens + work.num_decodes)),
    "wide tiles": lambda work: 0.007 + 0.002 * math.ceil((work.num_prompt_tokens + work.num_decodes) / 64),
    "slow host": lambda work: 0.02 + 1e-5 * work.num_prompt_tokens + 0.001 * work.num_decodes,
}


class Timed:
    """A scheduler whose steps take time, with arbitrary samples.

    Attributes:
        now: seconds.
        tokens: arrival times of tokens, by request.
        steps: work and duration of each step.
    """

    def __init__(
        self,
        takes: Takes,
        stages: int = 1,
        noise: float = 0.0,
        max_itl: float | None = None,
        threshold: int | None = None,
    ) -> None:
        kv = KVManager(4000, BLOCK, FULL, STEP, False)
        self.scheduler = Scheduler(
            kv, 16, STEP, long_prefill_token_threshold=threshold, max_itl=max_itl, num_batches=stages
        )
        self.takes, self.noise = takes, noise
        self.now = 0.0
        self.tokens: dict[str, list[float]] = {}
        self.steps: list[tuple[StepWork, float]] = []
        self._stages = stages
        self._last = 0.0
        self._in_flight: deque[tuple[Scheduled, float]] = deque()
        self._rng = Random(0)

    def add(self, name: str, length: int, max_tokens: int = 1) -> None:
        """Add a request with `length` prompt tokens."""
        self.scheduler.add(sampling(name, [1] * length, max_tokens))

    def step(self) -> None:
        """Complete one step. A stage takes its part of the time, and waits for the one before it."""
        while len(self._in_flight) < self._stages and (scheduled := self.scheduler.schedule()) is not None:
            self._in_flight.append((scheduled, self.now))
        scheduled, launched = self._in_flight.popleft()
        seconds = self.takes(scheduled.work) * self._rng.uniform(1 - self.noise, 1 + self.noise)
        self.now = max(self._last + seconds / self._stages, launched + seconds)
        since, self._last = self.now - max(self._last, launched), self.now
        self.steps.append((scheduled.work, since))
        result = StepResult([Sampled([[1]]) for num_samples in scheduled.step.num_samples if num_samples])
        for delta in self.scheduler.commit(scheduled, result, since):
            self.tokens.setdefault(delta.request_id, []).extend([self.now] * len(delta.token_ids))

    def until_ended(self, name: str) -> None:
        """Run steps until the request has ended."""
        while name in self.scheduler.requests:
            self.step()


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def serve(timed: Timed, streams: int, length: int) -> tuple[float, list[float], float]:
    """Return the gap of streams alone, the gaps beside a prompt of `length` tokens, and the prompt's duration."""
    for index in range(streams):
        timed.add(f"stream {index}", 6, max_tokens=4000)
    for _ in range(40):
        timed.step()
    alone = percentile(gaps(timed.tokens["stream 0"])[-20:], 0.5)
    began, seen = timed.now, len(timed.tokens["stream 0"])
    timed.add("long", length)
    timed.until_ended("long")
    return alone, gaps(timed.tokens["stream 0"][seen - 1 :]), timed.now - began


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("streams", [1, 9])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_stream_waits_four_decode_steps_and_the_prompt_little_longer(
    processor: str, streams: int, noise: float
) -> None:
    takes = PROCESSORS[processor]
    timed = Timed(takes, noise=noise)
    alone, beside, took = serve(timed, streams, 6000)
    decode = takes(StepWork(num_decodes=streams))
    assert alone == pytest.approx(decode, rel=max(noise, 1e-6))
    fewest = takes(StepWork(BLOCK, BLOCK * 12_000, streams))
    assert percentile(beside, 0.98) <= max(DECODE_STEPS * decode, fewest) * (1.02 + noise / 4)
    # With full use of the bound, the prompt gets all but a decode step's part of it.
    chunk = max(
        n for n in range(BLOCK, STEP - streams) if takes(StepWork(n, n * 6000, streams)) <= DECODE_STEPS * decode
    )
    # The prompt has at least two thirds of the speed that full use of the bound would give it; less with noise.
    ideal = 6000 / chunk * max(takes(StepWork(chunk, chunk * 6000, streams)), decode)
    assert ideal / took >= 1 / (1.5 + 2 * noise)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_gaps_of_a_stream_in_a_pipeline_are_bounded(stages: int) -> None:
    timed = Timed(PROCESSORS["few cores"], stages)
    alone, beside, _ = serve(timed, 2 * stages, 3000)
    assert percentile(beside, 0.98) <= DECODE_STEPS * alone * 1.05
    bounded = Timed(PROCESSORS["few cores"], stages, max_itl=0.3)
    _, beside, _ = serve(bounded, 2 * stages, 3000)
    assert 0.15 <= percentile(beside, 0.98) <= 0.3 * 1.05


@pytest.mark.parametrize("milliseconds", [80, 200, 1000])
def test_max_itl_bounds_the_gaps(milliseconds: int) -> None:
    timed = Timed(PROCESSORS["few cores"], max_itl=milliseconds / 1e3)
    _, beside, _ = serve(timed, 1, 4000)
    assert 0.6 * milliseconds / 1e3 <= percentile(beside, 0.9) <= percentile(beside, 0.99) <= milliseconds / 1e3


def test_max_itl_below_the_time_of_a_block_admits_one_block() -> None:
    timed = Timed(PROCESSORS["few cores"], max_itl=0.001)
    serve(timed, 1, 100)
    assert {work.num_prompt_tokens for work, _ in timed.steps if work.num_decodes and work.num_prompt_tokens} == {BLOCK}


def test_token_threshold_takes_precedence_over_max_itl() -> None:
    timed = Timed(PROCESSORS["few cores"], max_itl=0.001, threshold=100)
    serve(timed, 1, 1000)
    chunks = [work.num_prompt_tokens for work, _ in timed.steps if work.num_decodes and work.num_prompt_tokens]
    assert chunks == [100] * 10


def test_prompts_have_the_whole_step_without_decodes() -> None:
    timed = Timed(PROCESSORS["few cores"])
    for name in ("a", "b"):
        timed.add(name, 1000 + ord(name))
    for _ in range(4):
        timed.step()
    assert [work.num_prompt_tokens for work, _ in timed.steps[:4]] == [STEP, STEP, STEP, STEP]


def test_chunks_grow_gradually_while_their_cost_is_unknown() -> None:
    """The first prompt is short, so the cost of long ones is unknown."""
    timed = Timed(PROCESSORS["slow host"])
    serve(timed, 1, 5000)
    largest = 6
    for work, _ in timed.steps:
        assert work.num_prompt_tokens <= max(BLOCK, REACH * largest)
        largest = max(largest, work.num_prompt_tokens)
    assert largest > 400


def test_changes_of_the_processors_speed_are_followed() -> None:
    factor = 1.0
    fast = PROCESSORS["few cores"]
    timed = Timed(lambda work: factor * fast(work))
    serve(timed, 1, 1000)
    for factor in (5.0, 0.5):
        for _ in range(40):
            timed.step()
        seen = len(timed.tokens["stream 0"])
        timed.add(f"long {factor}", 3000)
        timed.until_ended(f"long {factor}")
        beside = gaps(timed.tokens["stream 0"][seen - 1 :])
        bound = DECODE_STEPS * factor * fast(StepWork(num_decodes=1))
        assert max(beside[5:]) <= 1.05 * bound
        assert percentile(beside, 0.5) >= 0.5 * bound


def test_delayed_step_is_soon_forgotten() -> None:
    held_up = False
    fast = PROCESSORS["few cores"]
    timed = Timed(lambda work: fast(work) + 30.0 * held_up)
    serve(timed, 1, 1000)
    usual = max(work.num_prompt_tokens for work, _ in timed.steps[-5:])
    timed.add("another", 3000)
    held_up = True
    timed.step()
    held_up = False
    timed.until_ended("another")
    chunks = [work.num_prompt_tokens for work, _ in timed.steps[-30:]]
    assert percentile([float(chunk) for chunk in chunks], 0.5) >= usual / 2


def test_prompts_share_the_time_in_queue_order() -> None:
    timed = Timed(PROCESSORS["few cores"])
    serve(timed, 1, 1000)
    for index in range(6):
        timed.add(f"short {index}", 10 + index)
    seen = len(timed.steps)
    timed.until_ended("short 5")
    bound = DECODE_STEPS * PROCESSORS["few cores"](StepWork(num_decodes=1))
    assert len(timed.steps) - seen <= 4
    assert all(seconds <= bound for _, seconds in timed.steps[seen:])
    assert [name for name, _ in sorted(timed.tokens.items(), key=lambda item: item[1][0]) if "short" in name] == [
        f"short {index}" for index in range(6)
    ]


def test_estimates_and_their_errors_are_never_negative() -> None:
    rng = Random(1)
    for _ in range(300):
        cost = StepCost()
        for _ in range(rng.randrange(1, 90)):
            n, start = rng.choice([0, rng.randrange(2000)]), rng.randrange(100_000)
            work = StepWork(n, n * (2 * start + n), rng.choice([0, 1, rng.randrange(256)]))
            cost.observe(work, rng.choice([0.0, 1e-9, 1e6, rng.random()]))
        estimate = cost.estimate
        coefficients = [estimate.fixed, estimate.token, estimate.pair, estimate.decode, estimate.error]
        assert all(0 <= coefficient < math.inf for coefficient in coefficients), coefficients
        start, seconds = rng.randrange(100_000), rng.random()
        num_tokens = estimate.prompt_tokens(start, seconds)
        if 0 < num_tokens < 1e9:
            cost_of = estimate.token * num_tokens + estimate.pair * (2 * start * num_tokens + num_tokens**2)
            assert cost_of == pytest.approx(seconds, rel=1e-6)
    assert StepCost().estimate == Estimate()
