"""When this process started."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/self/stat")
#: Index of `starttime` among the fields behind the process's name; man 5 proc_pid_stat counts it as field 22.
_START_TIME: Final = 19


def process_start(stat: Path = _STAT) -> float:
    """When this process was started, in seconds on the monotonic clock, to a clock tick (10 ms).

    The present moment where the system does not report it.
    """
    now = time.monotonic()
    try:
        # The name is in parentheses, and may have some of its own.
        ticks = int(stat.read_bytes().rpartition(b")")[2].split()[_START_TIME])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # no Linux
        return now
    return now - max(age, 0.0)
