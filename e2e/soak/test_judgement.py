"""The soak's evaluation: what counts as flat, and which failures a fault excuses."""

from __future__ import annotations

import math
import random

import pytest
from kit.traffic import Request

from soak import drift_check
from soak.faults import FAULTS, schedule
from soak.record import Record, Strike
from soak.samples import Life, Sample

_MIB = 1024**2


def memory(leak: float, minutes: int = 30) -> list[drift_check.Point]:
    """Return samples of a process of 200 MiB, every 10 s: with warm-up, noise, occasional doubling, and a leak of
    `leak` MiB per half hour.
    """
    dice = random.Random(0)
    points = []
    for when in range(0, minutes * 60, 10):
        value = 200 - 150 * math.exp(-when / 40) + dice.gauss(0, 3) + leak * when / 1800
        points.append((float(when), (value * 2 if dice.random() < 0.1 else value) * _MIB))
    return points


@pytest.mark.parametrize(("leak", "is_flat"), [(0, True), (5, True), (20, False), (200, False)])
def test_leak_is_distinguished_from_noise(leak: float, is_flat: bool) -> None:
    points = drift_check.settled(memory(leak), born=0.0)
    assert points[0][0] == drift_check.WARM_UP_S
    assert drift_check.growth(points) / _MIB == pytest.approx(leak, abs=3)
    assert drift_check.memory_is_flat(points) == is_flat


def test_short_life_is_not_evaluated() -> None:
    assert drift_check.settled(memory(200, minutes=7), born=0.0) == []
    assert drift_check.settled(memory(200, minutes=9), born=0.0)
    assert drift_check.slope([(1.0, 5.0)]) == 0


def test_the_slope_is_exact_on_a_line_with_a_wild_point() -> None:
    assert drift_check.slope([(0, 1), (1, 3), (2, 500), (3, 7), (4, 9)]) == pytest.approx(2)


def test_growing_counts_are_not_flat() -> None:
    for counts in ([], [10, 30, 10], [10, 10 + drift_check.COUNT]):
        assert drift_check.count_is_flat(counts)
    assert not drift_check.count_is_flat([10, 12, 15])


def request_of(start: float, end: float, outcome: str = "failed") -> Request:
    return Request(start, end, "chat", outcome, "" if outcome == "ok" else "APIConnectionError", 0)


def record(*requests: Request, endpoint: str = "struck") -> Record:
    """Return a record with a fault from 100 to 150, which excuses requests that start before 110, and a gentle fault
    from 200 to 230.
    """
    strikes = [Strike("engine SIGKILLed", 100, 110, 150), Strike("pod deleted", 200, None, 230)]
    result = Record(seed=0, struck="struck", began=0, strikes=strikes)
    result.requests[endpoint] = list(requests)
    result.judge()
    return result


def test_only_harsh_faults_excuse_failed_requests() -> None:
    assert not record(
        request_of(98, 100), request_of(109, 140), request_of(98, 130, "cut"), request_of(10, 11, "ok")
    ).problems
    for request in (request_of(90, 98), request_of(111, 112), request_of(120, 121, "cut"), request_of(201, 202)):
        (problem,) = record(request).problems
        assert "after" in problem and "APIConnectionError" in problem
    assert record(request_of(98, 100), endpoint="steady").problems


def test_page_lists_leaks_and_picture_draws_them() -> None:
    result = record(request_of(98, 100), request_of(10, 11, "ok"))
    samples = [Sample(when, int(value), 10 + int(when) // 100, 4, when % 300 == 0) for when, value in memory(100)]
    result.lives.append(Life("steady", "steady-1", "engine", samples))
    result.judge()
    assert [problem.partition(":")[2].split()[0] for problem in result.problems] == ["memory", "open"]
    page = result.page("picture.svg")
    assert all(problem in page for problem in result.problems)
    assert "| chat | 2 | 1 | 1 | 0 | 0 |" in page
    assert "| 1.7 min | engine SIGKILLed | 50 s | 1 |" in page
    picture = result.picture()
    assert picture.count("<polyline") == 2 and "engine SIGKILLed" in picture


def test_each_fault_occurs_once_before_any_repeats() -> None:
    drawn = schedule(random.Random(1))
    names = [next(drawn).name for _ in range(2 * len(FAULTS))]
    everything = {fault.name for fault in FAULTS}
    assert set(names[: len(FAULTS)]) == set(names[len(FAULTS) :]) == everything
    assert names[: len(FAULTS)] != [fault.name for fault in FAULTS]


def test_faults_that_need_root_are_omitted_on_foreign_nodes() -> None:
    drawn = schedule(random.Random(1), nodes_are_ours=False)
    assert not any(next(drawn).needs_root for _ in range(2 * len(FAULTS)))
