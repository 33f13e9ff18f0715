"""Which processes the watchdog kills as stuck, in virtual time; the process is faked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from stoker_common.errors import EngineDeadError, EngineStuckError
from stoker_engine.processes import watchdog
from stoker_engine.processes.heartbeat import Phase
from stoker_engine.processes.watchdog import HandlingStuckError, Watchdog

STEP_TIMEOUT = 100.0


class Status:
    phase = Phase.STEPPING


class Process:
    """Stands still from `since` until `until`, by the clock."""

    def __init__(
        self, clock: Callable[[], float], since: float, until: float, handling: bool = False, is_shared: bool = False
    ) -> None:
        self.is_shared, self.failed = is_shared, False
        self._clock, self._since, self._until, self._handling = clock, since, until, handling
        self.status, self.is_stopped, self.is_running = Status(), False, True
        self.killed: EngineDeadError | None = None

    @property
    def _still_for(self) -> float:
        now = self._clock()
        return now - self._since if self._since <= now < self._until else 0.0

    @property
    def busy_for(self) -> float:
        return 0.0 if self._handling else self._still_for

    @property
    def handling_for(self) -> float:
        return self._still_for if self._handling else 0.0

    def kill(self, because: EngineDeadError) -> None:
        assert not (self._handling and self.is_shared), "other front ends may use the engine"
        self.killed = because

    def fail(self, cause: EngineDeadError) -> None:
        assert self._handling and self.is_shared
        self.failed = True


def watch(
    monkeypatch: pytest.MonkeyPatch,
    since: float,
    until: float,
    *,
    frozen: tuple[float, float] = (0, 0),
    handling: bool = False,
    is_shared: bool = False,
    watched_from: float = 0.0,
) -> tuple[EngineDeadError | None, float]:
    """Return the error and time of the kill, or of the failure of this process, if it is within 1,000 s.

    Args:
        frozen: start and duration of a period in which the server does not run.
    """
    now = watched_from
    sleep = asyncio.sleep

    async def virtual_sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if frozen[0] <= now < frozen[0] + frozen[1]:
            now = frozen[0] + frozen[1]
        await sleep(0)

    async def run() -> tuple[EngineDeadError | None, float]:
        process = Process(lambda: now, since, until, handling, is_shared)
        deaths: list[EngineDeadError] = []
        hangs: list[EngineDeadError] = []
        dog = Watchdog(
            STEP_TIMEOUT, lambda: True, lambda _, death: deaths.append(death), lambda _, cause: hangs.append(cause)
        )
        monkeypatch.setattr(watchdog, "KILL_TIMEOUT_S", 0.0)
        monkeypatch.setattr(watchdog.asyncio, "sleep", virtual_sleep)
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
        dog.watch(process, asyncio.Future())  # type: ignore[arg-type]
        while now < 1000 and not deaths and not hangs:
            await sleep(0)
        dog.stop()
        assert deaths == ([] if process.killed is None else [process.killed]), (
            "the death is reported even if the process does not end"
        )
        assert len(hangs) == process.failed
        return hangs[0] if hangs else process.killed, now

    with monkeypatch.context() as monkeypatch:
        return asyncio.run(run())


def test_a_standstill_is_killed_after_the_step_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    death, at = watch(monkeypatch, since=10, until=1000)
    assert isinstance(death, EngineStuckError) and "stepping" in str(death)
    assert 110 < at < 112


def test_a_standstill_before_watching_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    death, at = watch(monkeypatch, since=10, until=1000, watched_from=90)
    assert death is not None and 110 < at < 112


def test_work_below_the_step_timeout_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(monkeypatch, since=10, until=109)[0] is None


@pytest.mark.parametrize("since", [10, 49.8, 50.0, 50.2])
def test_time_while_the_server_is_frozen_does_not_count(monkeypatch: pytest.MonkeyPatch, since: float) -> None:
    """Both may have been frozen, or the engine waited for the server. A step of 20 s lasts 420 s by the clock."""
    assert watch(monkeypatch, since=since, until=since + 420, frozen=(50, 400))[0] is None


@pytest.mark.parametrize("since, end", [(10, 510), (49.8, 550), (60, 550), (449, 550), (450, 550), (460, 560)])
def test_a_standstill_is_also_killed_after_a_freeze(monkeypatch: pytest.MonkeyPatch, since: float, end: float) -> None:
    """The server is frozen from 50 to 450."""
    death, at = watch(monkeypatch, since=since, until=1000, frozen=(50, 400))
    assert death is not None
    assert end - 2 < at < end + 2


@pytest.mark.parametrize("is_shared", [False, True])
def test_handling_one_message_for_too_long_is_the_fault_of_this_process(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    death, at = watch(monkeypatch, since=10, until=1000, handling=True, is_shared=is_shared)
    assert isinstance(death, HandlingStuckError)
    assert "the server was stuck" in str(death) and "--step-timeout" not in str(death)
    assert 310 < at < 312, "the limit is not the step timeout"
