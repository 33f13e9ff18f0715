"""Which processors each of the processes that share a machine computes on, and with how many threads.

Ranks are dealt over the machine's NUMA nodes, each to one where there are enough: what a rank reads most, its weights,
then lies in the memory beside its processors. Inside a node nobody is bound to cores: containers of one machine often
see all of its processors, and would all choose the first ones. What keeps ranks apart there is that together they have
no more threads than the node has cores.
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

#: cgroup v2 writes "quota period" into one file ("max 100000" where there is no limit), v1 writes two (-1).
_CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_SYSTEM: Final = Path("/sys/devices/system")


@dataclass(frozen=True)
class Machine:
    """What a process may compute on.

    Attributes:
        allowed: the processors that the system lets it run on.
        nodes: processors of each NUMA node, others than the allowed ones too; none where the system names no nodes.
        cores: of processors that are hyperthreads of one core, which; any other is a core by itself.
        quota: of how many processors the container has the time; None: of all.
    """

    allowed: Processors
    nodes: tuple[Processors, ...] = ()
    cores: tuple[Processors, ...] = ()
    quota: float | None = None

    @classmethod
    def current(cls, system: Path = _SYSTEM) -> Machine:
        """This process's.

        Args:
            system: where the kernel describes the machine.
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
        """How many cores these processors are of."""
        shared = [core & processors for core in self.cores if core & processors]
        return len(shared) + len(processors.difference(*shared))

    @property
    def time(self) -> int:
        """How many threads can compute at the same time: hyperthreads of one core share what computes."""
        cores = self.num_cores(self.allowed)
        return cores if self.quota is None else max(1, min(cores, math.ceil(self.quota)))


@dataclass(frozen=True)
class ProcessorShare:
    """What one of several processes computes on.

    Attributes:
        processors: those it runs on; others of the same node may have the same ones.
        threads: how many of its threads compute.
        is_crowded: there is less than one core, or less than one core's time, for each process.
    """

    processors: Processors
    threads: int
    is_crowded: bool


def deal(machine: Machine, count: int) -> list[ProcessorShare]:
    """Deals a machine's processors among `count` processes that compute at the same time."""
    if count > machine.time:
        return [ProcessorShare(machine.allowed, 1, True)] * count
    each = machine.time // count
    return [
        ProcessorShare(processors, min(each, machine.num_cores(processors) // sharers), False)
        for processors, sharers in _placements(machine, count)
    ]


def take_share(count: int, number: int, on_cpu: bool) -> ProcessorShare:
    """The share of one of `count` processes of this machine. The first one warns where there are too few processors.

    Args:
        count: how many there are.
        number: which of them this is.
        on_cpu: whether the CPU computes the model: if so, this thread and those that it starts run on the share alone.
    """
    machine = Machine.current()
    share = deal(machine, count)[number]
    if on_cpu:
        bind(share)
        if number == 0 and (warning := crowding(machine, count)) is not None:
            logger.warning(warning)
    return share


def crowding(machine: Machine, count: int) -> str | None:
    """What to tell whoever has more processes compute than there are processors; None: there are enough."""
    if count <= machine.time:
        return None
    limit = f" and time for {machine.quota:g}" if machine.quota is not None else ""
    return (
        f"{count} ranks share {machine.num_cores(machine.allowed)} cores{limit}: what comes out is right, but slow to "
        "come; give them more processors, or ask for fewer ranks"
    )


def bind(share: ProcessorShare) -> None:
    """Has this thread, and those that it starts from now on, run on the processors of `share`; where the system does
    not allow that, they run where they did."""
    try:
        os.sched_setaffinity(0, share.processors)
    except OSError:
        return  # taken away meanwhile, or forbidden


def cpu_quota() -> float | None:
    """Of how many processors this container has the time; None: no limit is set."""
    for files in _CPU_QUOTAS:
        if all(Path(file).is_file() for file in files):
            words = [word for file in files for word in Path(file).read_text().split()]
            return int(words[0]) / int(words[1]) if words[0].isdigit() else None
    return None


def parse_cpulist(text: str) -> Processors:
    """The kernel's way to write processors: "0-3,8,10-11"."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(number for first, _, last in ranges for number in range(int(first), int(last or first) + 1))


def _read(file: Path) -> Processors:
    try:
        return parse_cpulist(file.read_text())
    except (OSError, ValueError):
        return frozenset()


def _placements(machine: Machine, count: int) -> list[tuple[Processors, int]]:
    """For each of `count` processes where it runs, and how many of them run there."""
    nodes = _nodes(machine)
    if count < len(nodes):
        return [(frozenset().union(*group), 1) for group in _nodes_of_each(machine, nodes, count)]
    counts = _counts_of_each([machine.num_cores(node) for node in nodes], count)
    return [
        (node, num_processes) for node, num_processes in zip(nodes, counts, strict=True) for _ in range(num_processes)
    ]


def _nodes(machine: Machine) -> list[Processors]:
    """Nodes, of those processors that are allowed: none is empty, none lies in two nodes."""
    remaining, nodes = machine.allowed, []
    for node in (*machine.nodes, machine.allowed):
        if usable := remaining & node:
            remaining -= usable
            nodes.append(usable)
    return nodes


def _nodes_of_each(machine: Machine, nodes: list[Processors], count: int) -> list[list[Processors]]:
    """Whole nodes for fewer ranks: the largest first, each to the process that has the fewest cores."""
    dealt: list[list[Processors]] = [[] for _ in range(count)]
    for node in sorted(nodes, key=machine.num_cores, reverse=True):
        min(dealt, key=lambda few: sum(map(machine.num_cores, few))).append(node)
    return dealt


def _counts_of_each(sizes: list[int], count: int) -> list[int]:
    """How many ranks each node has, no more than its cores: each goes where it gets the most of them (D'Hondt), and
    of such nodes where there is none yet."""
    counts = [0] * len(sizes)
    for _ in range(count):
        counts[max(range(len(sizes)), key=lambda node: (sizes[node] / (counts[node] + 1), -counts[node]))] += 1
    return counts
