"""The number of processes that the kernel killed because this container's memory ran out.

If the kernel kills all processes of the container, Kubernetes reports it. With cgroup v1 it kills one process,
usually the engine's; then only this count distinguishes an OOM kill from another SIGKILL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: cgroup v2, then v1. Both have a line ``oom_kill N``.
_COUNTS: Final = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def oom_kills() -> int:
    """Return the number of OOM kills so far; 0 if the system does not count them."""
    for path in map(Path, _COUNTS):
        try:
            lines = path.read_text().split("\n")
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
