"""Waits for an idle machine: other load would be measured too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: Largest share of CPU time that other processes or virtual machines may use on an idle machine.
QUIET: Final = 0.10


def used_and_all() -> tuple[int, int]:
    """Return the ticks of all CPUs since boot: used ones, including time stolen by other virtual machines, and all."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # 3: idle, 4: iowait


class IdleWaiter:
    """Waits for an idle machine, at most `each_s` seconds at a time and 15 times that in total, then 1 s at a time."""

    def __init__(
        self,
        each_s: int,
        ticks: Callable[[], tuple[int, int]] = used_and_all,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._each_s, self._left_s, self._ticks, self._sleep = each_s, 15 * each_s, ticks, sleep

    def wait(self) -> bool:
        """Wait for a second in which the machine is idle; return False if there was none in time."""
        for _ in range(max(1, min(self._each_s, self._left_s))):
            used, of_all = self._ticks()
            self._sleep(1)
            used_then, of_all_then = self._ticks()
            if used_then - used <= QUIET * max(1, of_all_then - of_all):
                return True
            self._left_s -= 1
        return False
