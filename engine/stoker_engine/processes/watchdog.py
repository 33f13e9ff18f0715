"""Kills an engine that is stopped or stuck while requests or loads wait for it, so that these end with an error. If one
of several front ends hangs, this front end ends, not the engine.

It relies on information that a hanging process cannot falsify: the state of the process, and its heartbeat. The
watchdog runs only while `has_waiters` returns true.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from stoker_common.errors import EngineDeadError, EngineStuckError
from stoker_engine.processes.engine_pipe import EnginePipe
from stoker_engine.processes.heartbeat import PHASE_LABELS

#: Time after which a watched engine that is stopped is killed, in seconds.
STOPPED_TIMEOUT_S: Final = 3.0

#: Maximum time for this process to handle one message of the engine, in seconds.
HANDLING_TIMEOUT_S: Final = 300.0

#: Maximum time for a killed engine to end, in seconds.
KILL_TIMEOUT_S: Final = 15.0

#: Interval between two checks, in seconds.
INTERVAL_S: Final = 0.5


class HandlingStuckError(EngineStuckError):
    """This process, not the engine, was stuck while it handled a message of the engine."""


class StuckDetector:
    """Detects a stopped or stuck process by checks about `INTERVAL_S` apart.

    Time in which this process itself did not run is not counted: the engine may have been stopped too, or have waited
    for this process.
    """

    def __init__(self, process: EnginePipe) -> None:
        self.process = process
        self._stopped_for = self._lost = 0.0
        self._looked = time.monotonic()

    def check(self, step_timeout: float) -> EngineStuckError | None:
        """Return the error to kill the process for, or None; `step_timeout` as in `Watchdog`. If the error is a
        `HandlingStuckError`, the process itself may be healthy."""
        process = self.process
        elapsed = time.monotonic() - self._looked
        self._looked += elapsed
        still_for = max(process.busy_for, process.handling_for)
        lost = self._lost if still_for > elapsed else 0.0  # reset if the work started after the previous check
        self._lost = min(lost + max(elapsed - 2 * INTERVAL_S, 0.0), still_for)
        self._stopped_for = self._stopped_for + INTERVAL_S if process.is_stopped else 0.0
        if self._stopped_for >= STOPPED_TIMEOUT_S:
            return EngineStuckError(f"it was stopped for {self._stopped_for:.0f} s, and killed")
        if (cause := _overdue_work(process, step_timeout, self._lost)) is not None:
            return EngineStuckError(f"it was stuck ({cause}; --step-timeout), and killed")
        if _overdue_handling(process, self._lost) is not None:
            seconds = process.handling_for - self._lost
            return HandlingStuckError(f"the server was stuck: it handled a message of the engine for {seconds:.0f} s")
        return None


def standstill(process: EnginePipe, step_timeout: float) -> str | None:
    """Describe what exceeds its timeout: the work of a process, or this process's handling of a message from it;
    None: nothing does."""
    return _overdue_work(process, step_timeout) or _overdue_handling(process)


def _overdue_work(process: EnginePipe, step_timeout: float, lost: float = 0.0) -> str | None:
    """Describe a process's work that exceeds its timeout; `lost` seconds do not count."""
    seconds = process.busy_for - lost
    return f"{PHASE_LABELS[process.status.phase]}, for {seconds:.0f} s" if seconds > step_timeout else None


def _overdue_handling(process: EnginePipe, lost: float = 0.0) -> str | None:
    """Describe this process's handling of a message that exceeds its timeout; `lost` seconds do not count."""
    seconds = process.handling_for - lost
    return f"the server handles one of its messages, for {seconds:.0f} s" if seconds > HANDLING_TIMEOUT_S else None


class Watchdog:
    """Watches an engine process and its successors.

    Args:
        step_timeout: seconds after which a step, or a phase of loading without progress, counts as stuck.
        has_waiters: whether requests or loads wait for the engine, or it is stopped.
        on_death: called with the process and the reason for killing it, also if it is still alive after
            `KILL_TIMEOUT_S`.
        on_hang: called with the process and the error if this process hangs, and the engine lives on for others.
    """

    def __init__(
        self,
        step_timeout: float,
        has_waiters: Callable[[], bool],
        on_death: Callable[[EnginePipe, EngineDeadError], None],
        on_hang: Callable[[EnginePipe, EngineDeadError], None],
    ) -> None:
        self.step_timeout = step_timeout
        self._has_waiters = has_waiters
        self._on_death, self._on_hang = on_death, on_hang
        self._process: EnginePipe | None = None
        self._watching: asyncio.Task[None] | None = None

    def standstill(self, process: EnginePipe) -> str | None:
        """See the function `standstill`."""
        return standstill(process, self.step_timeout)

    def watch(self, process: EnginePipe, death: asyncio.Future[EngineDeadError]) -> None:
        """Watch `process`, unless it is already watched, until `has_waiters` returns false or `death` is done."""
        if process is not self._process or self._watching is None or self._watching.done():
            self.stop()
            self._process = process
            self._watching = asyncio.create_task(self._watch(process, death))

    async def kill(self, process: EnginePipe, death: asyncio.Future[EngineDeadError], cause: EngineDeadError) -> None:
        """Kill `process`, and wait until `death` is done, or report its death after `KILL_TIMEOUT_S`: callers must not
        wait for a process that cannot be killed."""
        process.kill(cause)
        await self._wait_dead(process, death, cause)

    def stop(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()

    async def _wait_dead(
        self, process: EnginePipe, death: asyncio.Future[EngineDeadError], cause: EngineDeadError
    ) -> None:
        await asyncio.wait({death}, timeout=KILL_TIMEOUT_S)
        self._on_death(process, cause)

    async def _watch(self, process: EnginePipe, death: asyncio.Future[EngineDeadError]) -> None:
        detector = StuckDetector(process)
        while not death.done() and self._has_waiters():
            await asyncio.sleep(INTERVAL_S)
            if (cause := detector.check(self.step_timeout)) is None:
                continue
            if isinstance(cause, HandlingStuckError) and process.is_shared:
                process.fail(cause)
                self._on_hang(process, cause)
                return
            await self.kill(process, death, cause)
