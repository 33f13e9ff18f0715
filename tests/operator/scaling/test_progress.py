"""Counters and durations of scaling, compared with values computed from whole random histories."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest

from stoker_common.scaling.signals import Signals
from stoker_operator.scaling.autoscaler import Observation, Phase, Recommendation
from stoker_operator.scaling.progress import ScalingProgress


class Moment(NamedTuple):
    replicas: int
    ready: int
    held: int | None = 0  # None: no gateway responded
    failure: str = ""
    change: int = 0


def run(history: list[Moment], step: float = 1.0) -> tuple[ScalingProgress, list[tuple[str, float]]]:
    """Return the counters, and the stages of starts."""
    progress, stages = ScalingProgress(), list[tuple[str, float]]()
    for number, each in enumerate(history):
        signals = None if each.held is None else Signals(held=each.held)
        observation = Observation(signals, each.replicas, each.ready, each.failure)
        recommended = Recommendation(1, Phase.ACTIVE, "", "", "", None, "True", each.change)
        stages += progress.update(observation, recommended, 100.0 + number * step)
    return progress, stages


def test_start_from_zero_is_measured_in_two_stages() -> None:
    progress, stages = run(
        [Moment(0, 0), Moment(0, 0, 2, change=1), Moment(0, 0, 3), Moment(1, 0, 3), Moment(1, 0, 3), Moment(1, 1)], 0.5
    )
    assert stages == [("written", 1.0), ("ready", 1.0)]
    assert (progress.num_starts, progress.num_failures, progress.num_up, progress.num_down) == (1, 0, 1, 0)


def test_starts_before_a_new_leader_are_not_measured() -> None:
    progress, stages = run([Moment(0, 0, 1), Moment(1, 0, 1), Moment(1, 1)])
    assert stages == [("ready", 1.0)] and progress.num_starts == 1
    progress, stages = run([Moment(1, 0, 1, "no image"), Moment(1, 0, 1, "no image"), Moment(1, 1)])
    assert (stages, progress.num_starts, progress.num_failures) == ([], 0, 0)


def test_failed_start_is_counted_once_and_not_measured() -> None:
    flapping = [Moment(1, 0, 1, text) for text in ("", "no image", "", "no image", "another")]
    progress, stages = run([Moment(0, 0), Moment(0, 0, 1), *flapping, Moment(1, 1)])
    assert (stages, progress.num_failures) == ([("written", 1.0)], 1)
    progress, _ = run([Moment(0, 0), *flapping, Moment(0, 0, 1, "no image"), *flapping])
    assert (progress.num_starts, progress.num_failures) == (2, 2)


def test_failure_of_an_earlier_start_is_not_of_the_next_one() -> None:
    progress, stages = run([Moment(0, 0, 0, "no image"), Moment(1, 0, 1, "no image"), Moment(1, 0, 1), Moment(1, 1)])
    assert (stages, progress.num_failures) == ([("ready", 2.0)], 0)


def _reference(history: list[Moment]) -> tuple[int, int, Counter[tuple[str, int]]]:
    """Return starts, failures and stages, by inspecting each start in the history."""
    stages = Counter[tuple[str, int]]()
    starts = [n for n in range(1, len(history)) if history[n].replicas and not history[n - 1].replicas]
    held = [not each.replicas and bool(each.held) for each in history]
    failing = {n for n in range(1, len(history)) if history[n].failure and not history[n - 1].failure}
    is_over = [bool(each.ready or not each.replicas) for each in history]
    num_failures, episode = 0, set[int]()
    for n in range(len(history)):
        if not is_over[n]:
            episode.add(n)
        if is_over[n] or n == len(history) - 1:
            num_failures += bool(episode & failing)
            episode = set()
    for start in starts:
        first = start
        while first > 0 and held[first - 1]:
            first -= 1
        if 0 < first < start:
            stages["written", start - first] += 1
        end = next((n for n in range(start, len(history)) if is_over[n]), None)
        if end is not None and history[end].ready and not failing & set(range(start, end)):
            stages["ready", end - start] += 1
    return len(starts), num_failures, stages


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_are_counted_as_by_a_full_scan(seed: int) -> None:
    rng, history = random.Random(seed), list[Moment]()
    for _ in range(2000):
        before = history[-1] if history else Moment(0, 0)
        replicas = before.replicas if rng.random() < 0.7 else rng.choice((0, 0, 1, 3))
        ready = min(replicas, before.ready if rng.random() < 0.7 else rng.choice((0, 0, 1, 3)))
        held = rng.choice((None, 0, 2)) if rng.random() < 0.3 else before.held
        failure = rng.choice(("", "", "no image", "no room")) if rng.random() < 0.4 else before.failure
        history.append(Moment(replicas, ready, held, failure, rng.choice((0, 0, 0, 2, -1))))
    progress, stages = run(history)
    measured = Counter((stage, int(seconds)) for stage, seconds in stages)
    assert (progress.num_starts, progress.num_failures, measured) == _reference(history)
    assert progress.num_starts > 50 and progress.num_failures > 20
    assert {stage for stage, _ in measured} == {"written", "ready"}
    assert progress.num_up == sum(each.change > 0 for each in history)
    assert progress.num_down == sum(each.change < 0 for each in history)
