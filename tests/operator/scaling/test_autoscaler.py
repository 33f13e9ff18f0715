"""The autoscaler's replicas, and the message of its condition."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from typing import Any

import pytest

from stoker_common.scaling.signals import EngineReport, Signals
from stoker_operator.scaling.autoscaler import Autoscaler, Observation, Phase, Recommendation, ScalingSettings
from stoker_operator.scaling.behavior import SCALE_UP, Behavior, Policy, Rules
from stoker_operator.scaling.start_time import StartTime

SETTINGS = ScalingSettings(1, 20, "pendingRequests", 4.0)
AT_ONCE = Rules(0.0, (Policy("Percent", 100, 15),))


class Loop:
    """An autoscaler whose decisions apply at once; pods start after `start_seconds`."""

    def __init__(self, settings: ScalingSettings, replicas: int = 1, start_seconds: float = 0.0, **first: Any) -> None:
        self.scaler, self.now, self.replicas, self.start_seconds = (
            Autoscaler(settings, 0.0),
            0.0,
            replicas,
            start_seconds,
        )
        self.ready, self.writes, self.first = replicas, [(replicas, -start_seconds)], first
        self.last: Recommendation | None = None

    def step(self, seconds: float = 0.5, **signals: Any) -> Recommendation:
        other = {name: signals.pop(name) for name in ("start_failure", "gateway_serves") if name in signals}
        self.now += seconds
        started = [count for count, written in self.writes if self.now >= written + self.start_seconds]
        self.ready = min(self.replicas, max(started))
        seen = (
            None if signals.get("missing") == "all" else Signals(**{"idle_seconds": 0.0, "drained": ("",), **signals})
        )
        status = self.first if self.last is None else {"phase": self.last.phase, "drain": self.last.drain}
        self.last = self.scaler.update(Observation(seen, self.replicas, self.ready, **status, **other), self.now)
        if self.last.replicas != self.replicas:
            self.replicas = self.last.replicas
            self.writes = [(min(count, self.replicas), written) for count, written in self.writes]
            self.writes.append((self.replicas, self.now))
        return self.last

    def run(self, seconds: float, **signals: Any) -> Recommendation:
        for _ in range(int(seconds * 2)):
            made = self.step(**signals)
        return made


def test_backlog_raises_the_count_by_policies_up_to_the_ceiling() -> None:
    loop = Loop(SETTINGS)
    made = loop.run(2, queued=400)
    assert (made.replicas, made.reason, made.status) == (5, "ScaleUpLimit", "True")
    assert "pendingRequests is 400, target 4 per replica" in made.message
    made = loop.run(60, queued=4000)
    assert (made.replicas, made.reason) == (20, "TooManyReplicas")


def test_count_falls_after_the_window_of_scale_down() -> None:
    loop = Loop(SETTINGS, 10)
    loop.run(70, in_flight=40)
    made = loop.run(200, in_flight=8)
    assert (made.replicas, made.reason) == (10, "ScaleDownStabilized") and "300 s" in made.message
    assert loop.run(170, in_flight=8).replicas == 2


def test_new_leader_keeps_the_count_for_one_window() -> None:
    loop = Loop(SETTINGS, 10)
    assert loop.run(299, in_flight=4).replicas == 10
    assert loop.run(5, in_flight=4).replicas == 1


@pytest.mark.parametrize("missing", ["all", ("10.0.0.1",)])
def test_missing_signals_never_lower_the_count(missing: Any) -> None:
    loop = Loop(SETTINGS, 10)
    made = loop.run(2000, missing=missing)
    assert (made.replicas, made.reason, made.status) == (10, "MissingSignals", "Unknown")


def test_known_signals_raise_the_count_while_others_are_missing() -> None:
    made = Loop(SETTINGS, 2).run(10, missing=("10.0.0.1",), queued=20)
    assert made.replicas == 5


@pytest.mark.parametrize("metric", ["runningRequests", "kvCacheUsage"])
def test_metrics_of_engines_set_the_count(metric: Any) -> None:
    def engines(count: int, age: float = 1.0) -> dict[str, EngineReport]:
        return {str(number): EngineReport(16, 0, 0.9, True, age) for number in range(count)}

    settings = dataclasses.replace(SETTINGS, metric=metric, target=8.0 if metric == "runningRequests" else 0.45)
    assert Loop(settings, 3).run(5, engines=engines(3)).replicas == 6
    loop = Loop(dataclasses.replace(settings, behavior=Behavior(SCALE_UP, AT_ONCE)), 9)
    made = loop.run(100, engines=engines(3, age=60.0))
    assert (made.replicas, made.reason) == (9, "MissingSignals"), "old reports count as missing"
    assert (
        loop.run(100, engines={**engines(1), **{f"x{n}": EngineReport(0, 0, 0, True, 0) for n in range(8)}}).replicas
        == 2
    )


def test_slow_start_with_a_constant_load_does_not_overshoot() -> None:
    loop = Loop(SETTINGS, 2, start_seconds=120.0)
    loop.run(70, in_flight=8)
    counts = []
    for tick in range(230):  # 2 requests/s more than are served; they wait
        counts.append(loop.step(in_flight=8, queued=tick).replicas)
    first = counts[40]
    assert 3 <= first <= 8 and max(counts) <= first + 4, "115 requests wait at the end"
    more = [loop.step(in_flight=8, queued=230 + 10 * tick).replicas for tick in range(40)]
    assert more[-1] > max(counts), "a real rise raises the count"


def test_replicas_that_start_for_held_requests_are_not_removed() -> None:
    loop = Loop(ZERO, 0, start_seconds=900.0, phase=Phase.ZERO, drain="id")
    loop.run(60, held=40)
    count = loop.replicas
    assert loop.run(800, held=40).replicas == count >= 4


def test_foreign_count_is_adopted_and_an_old_own_count_is_not() -> None:
    slow = Behavior(Rules(0.0, (Policy("Pods", 2, 15),)))
    scaler = Autoscaler(dataclasses.replace(SETTINGS, behavior=slow), 0.0)
    signals = Signals(in_flight=28, held=100, drained=("",))

    def count(replicas: int, now: float) -> int:
        return scaler.update(Observation(signals, replicas, replicas), now).replicas

    assert [count(7, 0.0), count(7, 1.0), count(9, 16.5)] == [9, 9, 11]
    assert count(9, 17.0) == 11, "the write of 11 is not seen yet"
    assert count(17, 17.5) == 17, "a count set by another program is adopted"


def test_shrinking_backlog_raises_nothing() -> None:
    loop = Loop(SETTINGS, 4)
    loop.scaler = Autoscaler(SETTINGS, 0.0, 30.0)
    loop.run(30, in_flight=16, queued=0)
    loop.step(in_flight=16, queued=0)
    settled = loop.replicas
    scaler = Autoscaler(SETTINGS, 0.0, 30.0)
    counts = list[int]()
    for tick in range(100):
        backlog = max(0, 200 - 4 * tick)
        counts.append(
            scaler.update(Observation(Signals(queued=backlog, in_flight=16, drained=("",)), 20, 20), tick).replicas
        )
    assert settled == 4 and set(counts) == {20}


def test_start_time_is_learned() -> None:
    loop = Loop(SETTINGS, 1, start_seconds=20.0)
    assert loop.run(3, queued=4).start_seconds is None
    made = loop.run(60, queued=40)
    assert made.start_seconds == pytest.approx(20.0, abs=1.0)
    again = Autoscaler(SETTINGS, 0.0, made.start_seconds)
    assert again.update(Observation(None, 1, 1), 1.0).start_seconds == made.start_seconds


def test_start_time_is_robust() -> None:
    known = StartTime(20.0)
    for number, seconds in enumerate([21.0, 900.0, 19.0, 20.0]):
        known.change(number + 1, number + 2, 1000.0 * number)
        known.observe(number + 2, False, 1000.0 * number + seconds)
    assert known.seconds == 20.0
    known.change(5, 6, 9000.0)
    known.observe(5, True, 9001.0)
    known.observe(6, False, 9900.0)
    assert known.seconds == 20.0, "a start that failed is no sample"
    known.change(6, 2, 9901.0)
    known.observe(2, False, 9902.0)
    assert known.seconds == 20.0, "a lower count is no sample"
    for impossible in (math.nan, math.inf, -1.0, 1e9):
        assert StartTime(impossible).seconds is None


ZERO = dataclasses.replace(SETTINGS, min_replicas=0, idle_seconds_to_zero=60.0)


def test_idle_counts_from_ready_and_from_the_last_request() -> None:
    loop = Loop(ZERO)
    assert loop.run(59, idle_seconds=9999.0).phase is Phase.ACTIVE, "the pod has just become ready"
    assert loop.run(2, idle_seconds=9999.0).phase is Phase.DRAINING
    loop = Loop(ZERO)
    assert loop.run(200, idle_seconds=59.0).phase is Phase.ACTIVE
    loop = Loop(ZERO)
    engines = {"a": EngineReport(1, 0, 0.1, True, 0.0)}
    assert loop.run(200, idle_seconds=9999.0, engines=engines).phase is Phase.ACTIVE, (
        "requests that bypass the gateway count"
    )
    assert {loop.step(idle_seconds=9999.0).phase for _ in range(118)} == {Phase.ACTIVE}
    assert loop.run(2, idle_seconds=9999.0).phase is Phase.DRAINING


def test_drain_id_lapses_and_the_next_one_is_later_and_different() -> None:
    loop = Loop(ZERO)
    draining = loop.run(60.5, idle_seconds=999.0)
    assert draining.phase is Phase.DRAINING and draining.replicas == 1
    assert loop.run(14.5, idle_seconds=999.0).drain == draining.drain, "no acknowledgement: still draining"
    assert loop.step(idle_seconds=999.0).phase is Phase.ACTIVE
    late = [loop.step(idle_seconds=999.0, drained=(draining.drain,)) for _ in range(89)]
    assert {made.phase for made in late} == {Phase.ACTIVE}, "a late acknowledgement has no effect"
    again = loop.step(idle_seconds=999.0)
    assert again.phase is Phase.DRAINING and again.drain != draining.drain


@pytest.mark.parametrize("signals", [{"held": 1}, {"queued": 1}, {"gateway_serves": False}])
def test_drain_is_withdrawn_at_once(signals: dict[str, Any]) -> None:
    loop = Loop(ZERO)
    loop.run(61, idle_seconds=999.0)
    made = loop.step(**signals)
    assert (made.phase, made.drain, made.replicas) == (Phase.ACTIVE, "", 1)


@pytest.mark.parametrize(
    ("drained", "seconds", "phase"), [(True, 1.0, Phase.ZERO), (False, 1.0, Phase.ACTIVE), (True, 15.0, Phase.ACTIVE)]
)
def test_zero_that_is_not_written_yet_stays_only_while_it_is_safe(drained: bool, seconds: float, phase: Phase) -> None:
    loop = Loop(ZERO)
    drain_id = loop.run(61, idle_seconds=999.0).drain
    assert loop.step(idle_seconds=999.0, drained=(drain_id,)).replicas == 0
    loop.replicas = loop.ready = 1  # the write failed
    loop.writes = [(1, 0.0)]
    made = loop.step(seconds, idle_seconds=999.0, drained=(drain_id if drained else "",))
    assert made.phase is phase and made.replicas == (0 if phase is Phase.ZERO else 1)


def test_pod_that_never_starts_is_ended_when_idle_only_if_its_start_failed() -> None:
    for failure, phase in (("", Phase.ACTIVE), ("ImagePullBackOff", Phase.DRAINING)):
        scaler = Autoscaler(ZERO, 0.0)
        for tick in range(70):
            made = scaler.update(Observation(Signals(idle_seconds=999.0, drained=("",)), 1, 0, failure), tick)
        assert made.phase is phase


def test_one_replica_is_kept_without_a_gateway() -> None:
    for replicas in (0, 1):
        made = Loop(ZERO, replicas).run(500, idle_seconds=999.0, gateway_serves=False)
        assert (made.replicas, made.phase, made.reason, made.status) == (1, Phase.ACTIVE, "NoGateway", "False")


@pytest.mark.parametrize(("held", "replicas"), [(1, 1), (4, 1), (5, 2), (9, 3), (1000, 4)])
def test_count_from_zero_follows_the_held_requests(held: int, replicas: int) -> None:
    loop = Loop(ZERO, 0, phase=Phase.ZERO, drain="id")
    assert loop.run(5, idle_seconds=999.0).replicas == 0
    made = loop.step(held=held)
    assert (made.replicas, made.phase, made.drain) == (replicas, Phase.ACTIVE, "")


def test_start_failure_is_reported() -> None:
    made = Loop(SETTINGS).run(5, held=3, start_failure="ErrImagePull: no such image")
    assert (made.reason, made.status) == ("StartFailed", "False") and "no such image" in made.message


def test_settings_may_change_without_losing_history() -> None:
    loop = Loop(SETTINGS, 10)
    loop.run(70, in_flight=40)
    loop.scaler.settings = dataclasses.replace(SETTINGS, max_replicas=6)
    assert loop.step(in_flight=40).replicas == 6
    loop.scaler.settings = dataclasses.replace(SETTINGS, min_replicas=8)
    assert loop.step(in_flight=40).replicas == 8
    loop.scaler.settings = SETTINGS
    assert loop.run(200, in_flight=0).replicas == 10, "earlier demand counts within the window"


def test_clocks_that_jump_back_change_nothing() -> None:
    scaler, other = Autoscaler(SETTINGS, 0.0), Autoscaler(SETTINGS, 0.0)
    generator = random.Random(1)
    now = 0.0
    for _ in range(500):
        now += 1.0
        signals = Signals(queued=generator.randint(0, 30), in_flight=20, drained=("",))
        expected = scaler.update(Observation(signals, 5, 5), now)
        assert other.update(Observation(signals, 5, 5), now) == expected
        for wrong in (now - 500, -1e300, math.nan, math.inf):
            assert _clock_after(other, Observation(signals, 5, 5), wrong) == now


def _clock_after(scaler: Autoscaler, observation: Observation, now: float) -> float:
    """Return the autoscaler's clock after an update at a wrong time; the autoscaler itself is unchanged."""
    other = copy.deepcopy(scaler)
    other.update(observation, now)
    return other._now


@pytest.mark.parametrize("seed", range(30))
def test_counts_stay_within_bounds_for_any_report(seed: int) -> None:
    generator = random.Random(seed)
    numbers = (0, 0, 1, 5, 1000, 10**9)
    settings = dataclasses.replace(
        SETTINGS,
        min_replicas=generator.choice([0, 1, 3]),
        max_replicas=generator.choice([3, 20, 10_000]),
        metric=generator.choice(["pendingRequests", "runningRequests", "kvCacheUsage"]),
        target=generator.choice([0.01, 1.0, 1e6]),
        idle_seconds_to_zero=generator.choice([1.0, 100.0]),
    )
    scaler, replicas = Autoscaler(settings, 0.0), generator.choice([0, 1, 100])
    now = 0.0
    for _ in range(300):
        now += generator.choice([0.0, 0.5, 20.0, 1e6])
        engines = {
            str(n): EngineReport(generator.choice(numbers), generator.choice(numbers), generator.random(), True, 0.0)
            for n in range(generator.choice([0, 0, 3]))
        }
        signals = Signals(
            held=generator.choice(numbers),
            queued=generator.choice(numbers),
            in_flight=generator.choice(numbers),
            idle_seconds=generator.choice([0.0, 1e9]),
            engines=engines,
            drained=generator.choice([("",), ("x",), ()]),
            missing=generator.choice([(), (), ("a",)]),
        )
        observation = Observation(generator.choice([signals, signals, None]), replicas, generator.choice([0, replicas]))
        made = scaler.update(observation, now)
        assert made.replicas <= settings.max_replicas or made.phase is Phase.DRAINING
        assert made.replicas >= settings.min_replicas
        assert made.replicas > 0 or made.phase is Phase.ZERO
        assert made.message.endswith(".") and made.reason.isalnum()
        replicas = made.replicas
