"""The start time of this process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/self/stat")
#: Index of `starttime` among the fields after the process's name; field 22 in man 5 proc_pid_stat.
_START_TIME: Final = 19


def process_start(stat: Path = _STAT) -> float:
    """Return the start time of this process, in seconds on the monotonic clock. The resolution is a clock tick.

    If the system does not report it, return the current time.
    """
    now = time.monotonic()
    try:
        # The name is in parentheses, and may itself contain parentheses.
        ticks = int(stat.read_bytes().rpartition(b")")[2].split()[_START_TIME])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return now
    return now - max(age, 0.0)
