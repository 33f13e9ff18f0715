"""Pauses of an adapter's load, so that it does not slow the steps that run meanwhile."""

from __future__ import annotations

import time
from typing import Final

#: CPU time after which a load pauses, in seconds.
_WORK_S: Final = 0.001
#: Ratio of a pause to the CPU time before it. A load of 8 MB takes about 5 ms of CPU time, more
#: if its files or its layout are new. While it runs, steps lose about a third of one processor.
_PAUSE: Final = 2.0


class Pace:
    """Pauses of one load, which runs in a separate thread.

    A load competes with the kernels' threads for CPUs, and with the engine's loop for the GIL. A lower thread priority
    would not help: on a busy machine, a thread that is not scheduled would keep the GIL.
    """

    def __init__(self) -> None:
        self._paused_at = time.thread_time()

    def give_way(self) -> None:
        """Pause if the thread has used `_WORK_S` seconds of CPU time since the last pause."""
        worked = time.thread_time() - self._paused_at
        if worked >= _WORK_S:
            time.sleep(_PAUSE * worked)
            self._paused_at = time.thread_time()
