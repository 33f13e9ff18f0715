"""What the front ends of a server with several front ends share.

Each front end is a process that accepts connections of the same socket. `server.front_ends` has the implementation.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Final, Protocol

_WORDS: Final = 3


class SharedCounts:
    """Counts of requests in flight by front end, in memory that all front ends share, and whether all have started.

    Each word is written by one process only: a front end writes its own counts, the supervisor the other words, and
    the counts of a front end that has ended. So no word needs a lock.

    Args:
        num_front_ends: number of front ends.
        fd: file descriptor of another process's `SharedCounts`; None: allocate memory.
    """

    def __init__(self, num_front_ends: int, fd: int | None = None) -> None:
        size = 8 * (1 + _WORDS * num_front_ends)
        if fd is None:
            fd = os.memfd_create("stoker-front-ends")
            os.ftruncate(fd, size)
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, size)).cast("q")

    @property
    def is_started(self) -> bool:
        """Whether all front ends have been ready once."""
        return bool(self._words[0])

    def start(self) -> None:
        """Record that all front ends have been ready."""
        self._words[0] = 1

    def show(self, front_end: int, num_requests: int, num_sequences: int, num_waiting_tokens: int) -> None:
        """Set the counts of a front end."""
        at = 1 + _WORDS * front_end
        self._words[at], self._words[at + 1], self._words[at + 2] = num_requests, num_sequences, num_waiting_tokens

    def total(self, but: int) -> tuple[int, int, int]:
        """Return the numbers of requests, sequences and waiting prompt tokens of all front ends except `but`."""
        totals = [0] * _WORDS
        for at in range(1, len(self._words)):
            if (at - 1) // _WORDS != but:
                totals[(at - 1) % _WORDS] += self._words[at]
        return totals[0], totals[1], totals[2]


class Peers(Protocol):
    """The other front ends of a server, for one front end.

    Attributes:
        index: index of this front end.
        name: part of the ids of this front end's requests; unique among current and earlier front ends.
        counts: counts of requests in flight.
        created: start of the server, in Unix seconds.
    """

    index: int
    name: str
    counts: SharedCounts
    created: int

    def on_loop_running(self) -> None:
        """Record that the event loop of this front end runs. Called in the event loop."""
        ...

    def on_ready(self) -> None:
        """Record that this front end serves."""
        ...

    def on_rejected(self, limit: str) -> None:
        """Count a request that was rejected by a queue limit."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the process that supervises the front ends.

        Raises:
            StokerError: the method raised it.
        """
        ...

    async def metrics(self) -> bytes:
        """Return the metrics of the whole server in Prometheus' text format."""
        ...
