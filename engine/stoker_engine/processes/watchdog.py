"""Kills an engine that is stopped or stuck while somebody waits for it, so that requests end with an error instead of
never.

It looks from outside at what cannot lie: the process's state, and since when it is at its current step. Without
requests nobody looks and nothing runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from stoker_common.errors import EngineDeadError, EngineStuckError
from stoker_engine.processes.engine_process import EngineProcess
from stoker_engine.processes.heartbeat import PHASE_LABELS

#: Seconds for which an engine may be stopped while somebody waits for it.
STOPPED_TIMEOUT_S: Final = 3.0

#: Seconds for which the server may be at one message of the engine.
HANDLING_TIMEOUT_S: Final = 300.0

#: Seconds that a killed engine may take to be gone.
KILL_TIMEOUT_S: Final = 15.0

#: Seconds between two looks.
INTERVAL_S: Final = 0.5


class StuckDetector:
    """Judges a process by looks at it, some `INTERVAL_S` apart.

    Time in which this process itself did not run does not count: then the engine may have been stopped, too, or waited
    for it.

    Args:
        process: that somebody waits for, from now on.
    """

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._stopped_for = self._lost = 0.0
        self._looked = time.monotonic()

    def check(self, step_timeout: float) -> EngineStuckError | None:
        """What it is to be killed for, if anything; `step_timeout` as in `Watchdog`."""
        process = self.process
        elapsed = time.monotonic() - self._looked
        self._looked += elapsed
        still_for = max(process.busy_for, process.handling_for)
        lost = self._lost if still_for > elapsed else 0.0  # it began before the last look, or is something new
        self._lost = min(lost + max(elapsed - 2 * INTERVAL_S, 0.0), still_for)
        self._stopped_for = self._stopped_for + INTERVAL_S if process.is_stopped else 0.0
        if self._stopped_for >= STOPPED_TIMEOUT_S:
            return EngineStuckError(f"it was stopped for {self._stopped_for:.0f} s, and killed")
        if (cause := standstill(process, step_timeout, self._lost)) is not None:
            return EngineStuckError(f"it was stuck ({cause}; --step-timeout), and killed")
        return None


def standstill(process: EngineProcess, step_timeout: float, lost: float = 0.0) -> str | None:
    """What takes a process too long, if something does; `lost` seconds of it are not counted."""
    if (seconds := process.busy_for - lost) > step_timeout:
        return f"{PHASE_LABELS[process.status.phase]}, for {seconds:.0f} s"
    if (seconds := process.handling_for - lost) > HANDLING_TIMEOUT_S:
        return f"the server handles one of its messages, for {seconds:.0f} s"
    return None


class Watchdog:
    """Looks after an engine process, and the one that follows it.

    Args:
        step_timeout: seconds after which a step, or a phase of loading that does not progress, counts as stuck.
        has_waiters: whether requests wait for the engine.
        on_death: called with a process and what it was killed for, also where it cannot be killed.
    """

    def __init__(
        self,
        step_timeout: float,
        has_waiters: Callable[[], bool],
        on_death: Callable[[EngineProcess, EngineDeadError], None],
    ) -> None:
        self.step_timeout = step_timeout
        self._has_waiters = has_waiters
        self._on_death = on_death
        self._process: EngineProcess | None = None
        self._watching: asyncio.Task[None] | None = None

    def standstill(self, process: EngineProcess) -> str | None:
        """What takes too long, if something does."""
        return standstill(process, self.step_timeout)

    def watch(self, process: EngineProcess, death: asyncio.Future[EngineDeadError]) -> None:
        """Watches `process` until nobody waits for it any more or `death` is done; it may be watched already."""
        if process is not self._process or self._watching is None or self._watching.done():
            self.stop()
            self._process = process
            self._watching = asyncio.create_task(self._watch(process, death))

    def stop(self) -> None:
        """Ends watching."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, process: EngineProcess, death: asyncio.Future[EngineDeadError]) -> None:
        detector = StuckDetector(process)
        while not death.done() and self._has_waiters():
            await asyncio.sleep(INTERVAL_S)
            if (cause := detector.check(self.step_timeout)) is None:
                continue
            process.kill(cause)
            await asyncio.wait({death}, timeout=KILL_TIMEOUT_S)
            self._on_death(process, cause)  # nobody waits for a process that cannot be killed
