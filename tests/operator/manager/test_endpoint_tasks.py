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


def test_wakes_during_a_reconcile_cause_one_more(virtual_time: Any) -> None:
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


def test_resync_interval_grows_while_nothing_changes(virtual_time: Any) -> None:
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


def test_errors_are_retried_with_backoff_and_events_at_once(virtual_time: Any) -> None:
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


def test_retry_after_of_the_api_server_is_obeyed(virtual_time: Any) -> None:
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
        assert recorder.times[1:] == [31, 634], "the wake-up is not lost, and the delay is limited"
        await waker.stop()

    virtual_time(main)


def test_endpoint_changed_meanwhile_is_reconciled_again_at_once(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(Outcome.CHANGED)
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(10)
        assert recorder.times == [0, 1]
        await waker.stop()

    virtual_time(main)


def test_held_endpoint_is_reconciled_every_second(virtual_time: Any) -> None:
    async def main() -> None:
        recorder = Recorder(*[Outcome.HELD] * 4)
        waker = tasks(recorder)
        waker.wake(KEY)
        await elapse(100)
        assert recorder.times == [0, 2, 4, 6, 8]
        await waker.stop()

    virtual_time(main)


def test_deleted_endpoint_leaves_no_task(virtual_time: Any) -> None:
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


def test_endpoint_that_returns_during_its_removal_is_not_lost(virtual_time: Any) -> None:
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


def test_slow_endpoint_delays_no_other(virtual_time: Any) -> None:
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
