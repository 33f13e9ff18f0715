"""Keeps the load of an adapter from slowing the steps that run beside it."""

from __future__ import annotations

import time
from typing import Final

#: Seconds of processor time after which a load pauses.
_WORK_S: Final = 0.001
#: How many times as long as it worked a load pauses. A load of 8 MB works for some 15 ms.
_PAUSE: Final = 1.0


class Pace:
    """The pauses of one load, which has a thread of its own.

    A load and the kernels' threads share few processors, and a load and the engine's loop share Python's lock. Lower
    priority would not do: on a busy machine, a thread that the system does not run would keep that lock.
    """

    def __init__(self) -> None:
        self._paused_at = time.thread_time()

    def give_way(self) -> None:
        """Pauses, if the thread has worked for a moment since the last pause."""
        worked = time.thread_time() - self._paused_at
        if worked >= _WORK_S:
            time.sleep(_PAUSE * worked)
            self._paused_at = time.thread_time()
