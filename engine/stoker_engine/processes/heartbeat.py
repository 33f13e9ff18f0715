"""What the engine process is doing, and since when, in memory that both processes share.

An engine that hangs cannot say so; but the moment it began what it is at stands here, and whoever looks can see how
long that takes. Two aligned words, each written whole; a reader may see the one before the other, for nanoseconds.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from typing import Final

_SIZE: Final = 16


class Phase(enum.IntEnum):
    """What an engine process does, in the order it comes to it."""

    STARTING = 0
    WAITING = 1
    LOADING = 2
    IDLE = 3
    STEPPING = 4
    SENDING = 5

    @property
    def is_work(self) -> bool:
        """Whether it must come to an end by itself, rather than wait for others."""
        return self not in (Phase.WAITING, Phase.IDLE)


#: For people.
PHASE_LABELS: Final = {
    Phase.STARTING: "loading: the engine process starts",
    Phase.WAITING: "loading: looking for the model's files",
    Phase.LOADING: "loading: reading the model",
    Phase.IDLE: "idle",
    Phase.STEPPING: "stepping",
    Phase.SENDING: "sending its outputs",
}


class Heartbeat:
    """A phase and its beginning (seconds on the monotonic clock, which all processes of a machine share).

    Args:
        fd: of the memory, from another process's `Heartbeat`; None makes it.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("stoker-engine-status")
            os.ftruncate(fd, _SIZE)
        self.fd = fd
        # Not by `struct`, which clears the bytes before it writes them: a reader would see that.
        self._memory = memoryview(mmap.mmap(fd, _SIZE))
        self._since = self._memory[:8].cast("d")
        self._phase = self._memory[8:].cast("q")

    def enter(self, phase: Phase) -> None:
        """Begins a phase, or records that it progresses."""
        self._since[0] = time.monotonic()
        self._phase[0] = phase

    @property
    def phase(self) -> Phase:
        """What it does."""
        return Phase(self._phase[0])

    @property
    def busy_for(self) -> float:
        """Seconds since it began what must come to an end by itself, or since that progressed; 0 where it waits."""
        if not self.phase.is_work:
            return 0.0
        return time.monotonic() - self._since[0]
