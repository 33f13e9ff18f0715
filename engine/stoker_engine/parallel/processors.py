"""CPU affinity and number of threads of each process that computes on a machine.

If there are enough cores, each process is bound to one or more NUMA nodes, so that its weights are in node-local
memory. It is not bound to cores of a node, because containers often see all processors of the machine, and all would
choose the first ones. Instead, each process has at most an equal part of the cores as threads, and at least one thread.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

Processors = frozenset[int]

#: cgroup v2 has "quota period" in one file ("max 100000": no limit), v1 has two files (-1: no limit).
_CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_SYSTEM: Final = Path("/sys/devices/system")


@dataclass(frozen=True)
class Machine:
    """The processors available to a process. A processor is a hyperthread.

    Attributes:
        allowed: processors in the process's CPU affinity.
        nodes: processors of each NUMA node, including ones that are not allowed; empty if the system reports no nodes.
        cores: sets of processors that share a core; a processor in no set is a core by itself.
        quota: CPU limit of the container, in processors; None: no limit.
    """

    allowed: Processors
    nodes: tuple[Processors, ...] = ()
    cores: tuple[Processors, ...] = ()
    quota: float | None = None

    @classmethod
    def current(cls, system: Path = _SYSTEM) -> Machine:
        """Return the processors available to this process.

        Args:
            system: a folder with the contents of /sys/devices/system.
        """
        allowed = frozenset(os.sched_getaffinity(0))
        cores = {_read(system / f"cpu/cpu{number}/topology/thread_siblings_list") for number in allowed}
        folders = sorted(system.glob("node/node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
        return cls(
            allowed,
            tuple(_read(folder / "cpulist") for folder in folders),
            tuple(sorted(cores - {frozenset()}, key=min)),
            cpu_quota(),
        )

    def num_cores(self, processors: Processors) -> int:
        """Return the number of cores to which these processors belong."""
        shared = [core & processors for core in self.cores if core & processors]
        return len(shared) + len(processors.difference(*shared))

    @property
    def time(self) -> int:
        """Number of threads that can compute concurrently: one per core, because hyperthreads of a core share its
        units, and at most the CPU limit, rounded up."""
        cores = self.num_cores(self.allowed)
        return cores if self.quota is None else max(1, min(cores, math.ceil(self.quota)))


@dataclass(frozen=True)
class ProcessorShare:
    """The processors of one of several processes.

    Attributes:
        processors: its CPU affinity; other processes may have the same.
        threads: number of its threads that compute.
        is_crowded: whether the processes are more than the cores, or than the CPU limit rounded up.
    """

    processors: Processors
    threads: int
    is_crowded: bool


def deal(machine: Machine, count: int) -> list[ProcessorShare]:
    """Distribute a machine's processors among `count` processes that compute concurrently."""
    if count > machine.time:
        return [ProcessorShare(machine.allowed, 1, True)] * count
    each = machine.time // count
    return [
        ProcessorShare(processors, min(each, machine.num_cores(processors) // sharers), False)
        for processors, sharers in _placements(machine, count)
    ]


def take_share(count: int, number: int, on_cpu: bool) -> ProcessorShare:
    """Return the share of this process.

    Args:
        count: number of processes that share the machine.
        number: index of this process.
        on_cpu: whether the CPU computes the model. If so, this thread and threads that it starts are bound to the
            share, and the first process logs a warning if processes are crowded.
    """
    machine = Machine.current()
    share = deal(machine, count)[number]
    if on_cpu:
        bind(share)
        if number == 0 and (warning := crowding(machine, count)) is not None:
            logger.warning(warning)
    return share


def crowding(machine: Machine, count: int) -> str | None:
    """Return a warning if `count` processes are crowded, see `ProcessorShare`; otherwise None."""
    if count <= machine.time:
        return None
    limit = f" with a CPU limit of {machine.quota:g}" if machine.quota is not None else ""
    return (
        f"{count} ranks share {machine.num_cores(machine.allowed)} cores{limit}: results are correct, but slow; "
        "provide more processors, or reduce the number of ranks"
    )


def bind(share: ProcessorShare) -> None:
    """Bind this thread, and threads started by it afterwards, to the processors of `share`, if the system permits."""
    try:
        os.sched_setaffinity(0, share.processors)
    except OSError:
        return  # the processors were removed meanwhile, or binding is forbidden


def cpu_quota() -> float | None:
    """Return the CPU limit of this container, in processors; None if it has no limit or the limit is unknown."""
    for files in _CPU_QUOTAS:
        if all(Path(file).is_file() for file in files):
            words = [word for file in files for word in Path(file).read_text().split()]
            return int(words[0]) / int(words[1]) if words[0].isdigit() else None
    return None


def parse_cpulist(text: str) -> Processors:
    """Parse the kernel's list format of processors, such as "0-3,8,10-11"."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(number for first, _, last in ranges for number in range(int(first), int(last or first) + 1))


def _read(file: Path) -> Processors:
    try:
        return parse_cpulist(file.read_text())
    except (OSError, ValueError):
        return frozenset()


def _placements(machine: Machine, count: int) -> list[tuple[Processors, int]]:
    """Return for each of `count` processes, at most one per core, its processors, and the number of processes that
    share them."""
    nodes = _nodes(machine)
    if count < len(nodes):
        return [(frozenset().union(*group), 1) for group in _nodes_of_each(machine, nodes, count)]
    counts = _counts_of_each([machine.num_cores(node) for node in nodes], count)
    return [
        (node, num_processes) for node, num_processes in zip(nodes, counts, strict=True) for _ in range(num_processes)
    ]


def _nodes(machine: Machine) -> list[Processors]:
    """Return the allowed processors, grouped by NUMA node; the last group may be those of unknown nodes. No group is
    empty, and groups are disjoint."""
    remaining, nodes = machine.allowed, []
    for node in (*machine.nodes, machine.allowed):
        if usable := remaining & node:
            remaining -= usable
            nodes.append(usable)
    return nodes


def _nodes_of_each(machine: Machine, nodes: list[Processors], count: int) -> list[list[Processors]]:
    """Assign each node to one of fewer processes: the largest node first, each to the process with the fewest cores."""
    dealt: list[list[Processors]] = [[] for _ in range(count)]
    for node in sorted(nodes, key=machine.num_cores, reverse=True):
        min(dealt, key=lambda few: sum(map(machine.num_cores, few))).append(node)
    return dealt


def _counts_of_each(sizes: list[int], count: int) -> list[int]:
    """Return the number of processes of each node, for at most one process per core. Each process is assigned to the
    node that then has the most cores per process (D'Hondt); of equal nodes, to the one with the fewest processes."""
    counts = [0] * len(sizes)
    for _ in range(count):
        counts[max(range(len(sizes)), key=lambda node: (sizes[node] / (counts[node] + 1), -counts[node]))] += 1
    return counts
