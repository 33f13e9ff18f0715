"""The memory of this machine or container."""

from __future__ import annotations

from pathlib import Path

#: cgroup v2, then v1; without a limit they contain "max" or a number near 2^63.
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Return the machine's memory or, if less, the container's limit, in bytes."""
    return min([_machine_memory(), *_cgroup_limits()])


def _machine_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemTotal")


def _cgroup_limits() -> list[int]:
    limits = []
    for path in map(Path, _CGROUP_LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return limits
