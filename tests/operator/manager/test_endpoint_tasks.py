"""One task per endpoint: coalescing, delays, backoff, in virtual time and without a cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from stoker_operator.cluster.kube import KubeError
from stoker_operator.manager.endpoint_tasks import EndpointTasks
from stoker_operator.objects.facts import Key
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.settings import Settings

from ...support.virtual_time import elapse
from ...support.virtual_time import now as virtual_time_now

SETTINGS = Settings(resync_seconds=600, recheck_seconds=2, backoff_seconds=1)
KEY = Key("default", "demo")


def now() -> float:
    return round(virtual_time_now(), 3)


class Recorder:
    """A reconcile that takes a second, records when it ran, and ends with the given result."""

    def __init__(self, *outcomes: Outcome | Exception) -> None:
        self.outcomes = list(outcomes)
        self.times: list[float] = []
        self.running = 0

    async def __call__(self, key: Key) -> Outcome:
        self.times.append(now())
        self.running += 1
        assert self.running == 1, "an endpoint is never reconciled twice at a time"
        await elapse(1)
        self.running -= 1
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome.SETTLED
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def tasks(reconcile: Callable[[Key], Awaitable[Outcome]]) -> EndpointTasks:
    return EndpointTasks(reconcile, SETTINGS, jitter=lambda: 0.5)


def test_wakes_during_a_reconcile_become_one_more(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder()
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(0.5)
        for _ in range(10):
            waker.wake(KEY)
        await elapse(10)
        assert recorder.times == [0, 1]
        await waker.stop()

    virtual_time(main)


def test_the_clock_wakes_soon_while_something_moves_and_later_while_nothing_happens(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(*[Outcome.MOVING] * 7)
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(90)
        assert recorder.times == [0, 3, 8, 17, 34, 67]
        waker.wake(KEY)
        await elapse(700)
        assert recorder.times[6:] == [90, 93, 694]
        await waker.stop()

    virtual_time(main)


def test_errors_are_retried_ever_more_slowly_and_an_event_does_not_wait(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(KubeError(500, "down"), ValueError("a bug"), Outcome.REFUSED, KubeError(0, "no answer"))
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(12.5)
        assert recorder.times == [0, 2, 5, 10]
        waker.wake(KEY)
        await elapse(100)
        assert recorder.times == [0, 2, 5, 10, 12.5]
        await waker.stop()

    virtual_time(main)


def test_an_api_server_that_wants_to_be_left_alone_is(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(KubeError(429, "too many requests", 30), KubeError(503, "not now", 1e9))
        waker = tasks(recorder)
        waker.wake(KEY)
        for _ in range(20):
            await elapse(1)
            waker.wake(KEY)
        await elapse(10)
        assert recorder.times == [0]
        await elapse(1000)
        assert recorder.times[1:] == [31, 634], "a wake-up is not lost, and there is a limit"
        await waker.stop()

    virtual_time(main)


def test_what_changed_meanwhile_is_looked_at_again_at_once(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(Outcome.CHANGED)
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(10)
        assert recorder.times == [0, 1]
        await waker.stop()

    virtual_time(main)


def test_what_is_held_is_looked_at_every_second(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(*[Outcome.HELD] * 4)
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(100)
        assert recorder.times == [0, 2, 4, 6, 8]
        await waker.stop()

    virtual_time(main)


def test_an_endpoint_that_is_gone_leaves_nothing(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(Outcome.GONE)
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(2)
        assert len(waker) == 0
        waker.wake(KEY)  # and may come again
        await elapse(2)
        assert recorder.times == [0, 2]
        await waker.stop()

    virtual_time(main)


def test_one_that_comes_back_while_it_is_found_gone_is_not_lost(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(Outcome.GONE)
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(0.5)
        waker.wake(KEY)
        await elapse(5)
        assert recorder.times == [0, 1]
        assert len(waker) == 1
        await waker.stop()

    virtual_time(main)


def test_a_slow_endpoint_keeps_nobody_waiting(virtual_time: Any) -> None:
    async def main() -> None:
        seen: list[tuple[float, str]] = []

        async def reconcile(key: Key) -> Outcome:
            await elapse(100 if key.name == "slow" else 1)
            seen.append((now(), key.name))
            return Outcome.SETTLED

        waker = tasks(reconcile)
        waker.wake(Key("default", "slow"))
        waker.wake(Key("default", "quick"))
        await elapse(101)
        assert seen == [(1, "quick"), (100, "slow")]
        await waker.stop()

    virtual_time(main)
