"""The current phase of the engine process and the time of its start or last progress, in memory shared with the parent.

A hanging engine cannot report that it hangs, but its parent can read since when. The memory consists of two aligned
words, each of which is written atomically. A reader may see one word updated before the other, for nanoseconds.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from typing import Final

_SIZE: Final = 16


class Phase(enum.IntEnum):
    """Phases of an engine process, in the order of a start."""

    STARTING = 0
    WAITING = 1
    LOADING = 2
    IDLE = 3
    STEPPING = 4
    SENDING = 5

    @property
    def is_work(self) -> bool:
        """Whether the phase must end or make progress within the step timeout."""
        return self not in (Phase.WAITING, Phase.IDLE)


#: Descriptions for users.
PHASE_LABELS: Final = {
    Phase.STARTING: "loading: the engine process starts",
    Phase.WAITING: "loading: looking for the model's files",
    Phase.LOADING: "loading: reading the model",
    Phase.IDLE: "idle",
    Phase.STEPPING: "stepping",
    Phase.SENDING: "sending its outputs",
}


class Heartbeat:
    """A phase and the time of its start or last progress (seconds on the monotonic clock, which all processes of a
    machine share).

    Args:
        fd: file descriptor of another process's `Heartbeat`; None: allocate memory.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("stoker-engine-status")
            os.ftruncate(fd, _SIZE)
        self.fd = fd
        # `struct` is not used, because it clears the bytes before it writes them, which a reader could see.
        self._memory = memoryview(mmap.mmap(fd, _SIZE))
        self._since = self._memory[:8].cast("d")
        self._phase = self._memory[8:].cast("q")

    def enter(self, phase: Phase) -> None:
        """Start a phase, or record progress in it."""
        self._since[0] = time.monotonic()
        self._phase[0] = phase

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return Phase(self._phase[0])

    @property
    def busy_for(self) -> float:
        """Seconds since the start or last progress of a work phase (see `Phase.is_work`); 0 while the process waits."""
        if not self.phase.is_work:
            return 0.0
        return time.monotonic() - self._since[0]
