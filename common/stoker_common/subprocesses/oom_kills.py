"""How often the kernel killed a process of this container because its memory ran out.

Where all processes of a container die together Kubernetes reports it. Where only one does (cgroup v1), it is the
engine, which is the largest, and only these counts distinguish that kill from another's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: cgroup v2, then v1. Both have a line ``oom_kill N``.
_COUNTS: Final = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def oom_kills() -> int:
    """The count so far; 0 where none is kept."""
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
