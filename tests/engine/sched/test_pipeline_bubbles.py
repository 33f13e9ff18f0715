"""Idle time of the last stage in a simulated pipeline: only while it fills.

Each stage takes one unit of time per step. Step k leaves the last of p stages at max(end of step k - 1, plus 1; launch
of step k, plus p); a longer gap than 1 after step k - 1 is a bubble.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from random import Random

import pytest

from stoker_engine.core.engine_request import EngineRequest

from .fake_model import FakeModel, sampling


def bubbles(fake_model: FakeModel, stages: int, until: int, later: Sequence[EngineRequest] = ()) -> int:
    """Return the idle units of the last stage, while at least `until` sequences run or more requests follow.

    Args:
        later: requests that arrive one by one, every third step.
    """
    now, last, waited, waiting = 0, 0, 0, deque(later)
    leaves: deque[int] = deque()
    for number in range(10_000):
        if waiting and number % 3 == 0:
            fake_model.add(waiting.popleft())
        scheduler = fake_model.scheduler
        if not scheduler.has_work or (len(scheduler.running) + len(scheduler.waiting) < until and not waiting):
            return waited
        before = scheduler.num_in_flight
        fake_model.launch()
        for _ in range(scheduler.num_in_flight - before):
            leaves.append(max(last + 1, now + stages))
            waited += leaves[-1] - last - 1
            last = leaves[-1]
        now = leaves.popleft()
        fake_model.step()
    raise AssertionError("the requests do not end")


def pipeline(stages: int, tokens: int = 256) -> FakeModel:
    return FakeModel(2000, 64, tokens, in_flight=stages, num_batches=stages)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("surplus", [0, 1, 5])
def test_decodes_keep_all_stages_busy(stages: int, surplus: int) -> None:
    """The pipeline fills once with the prompts, which are one step here, and once with their first tokens."""
    fake_model = pipeline(stages)
    for index in range(stages + surplus):
        fake_model.add(sampling(str(index), [index, 1, 2], 40))
    assert bubbles(fake_model, stages, until=stages) <= 2 * (stages - 1)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_chunks_of_a_prompt_follow_each_other_through_the_stages(stages: int) -> None:
    fake_model = pipeline(stages, tokens=8)
    fake_model.add(sampling("long", [index % 7 for index in range(160)], 1))
    assert bubbles(fake_model, stages, until=1) <= stages - 1
    assert len(fake_model.batches) == 20


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_prompts_beside_decodes_leave_few_bubbles(stages: int) -> None:
    chance, fake_model = Random(stages), pipeline(stages, tokens=24)
    for index in range(2 * stages):
        fake_model.add(sampling(str(index), [index, 1], 60))
    later = [sampling(f"later {i}", [chance.randrange(40) for _ in range(50)], 30) for i in range(12)]
    assert bubbles(fake_model, stages, stages, later) <= 2 * (stages - 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_sequences_that_end_at_random_leave_few_bubbles(stages: int, seed: int) -> None:
    """A batch that ends completely leaves a gap until sequences are redistributed: at most one filling per gap."""
    chance, fake_model, count = Random(seed), pipeline(stages), 32
    for index in range(count):
        fake_model.add(sampling(str(index), [index, seed], chance.randrange(1, 80)))
    waited = bubbles(fake_model, stages, until=stages)
    assert waited <= 4 * (stages - 1), f"{waited} of {len(fake_model.batches)}"


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_no_sequence_starves_and_one_alone_never_waits(stages: int) -> None:
    fake_model = pipeline(stages)
    for index in range(3 * stages + 1):
        fake_model.add(sampling(str(index), [index], 30))
    fake_model.drain()
    steps: dict[str, list[int]] = {}
    for number, batch in enumerate(fake_model.batches):
        for share in batch.sequences:
            steps.setdefault(share.id, []).append(number)
    assert max(b - a for of_sequence in steps.values() for a, b in itertools.pairwise(of_sequence)) <= 2 * stages
    alone = pipeline(stages)
    alone.add(sampling("alone", [1], 20))
    alone.drain()
    assert len(alone.batches) == 20
