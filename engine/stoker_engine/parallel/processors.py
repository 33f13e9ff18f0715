"""Which processors each of the processes that share a machine computes on.

Ranks are dealt over the machine's NUMA nodes, each to one where there are enough: what a rank reads most, its weights,
then lies in the memory beside its processors. Inside a node its cores are shared out; a core's hyperthreads stay
together, for they share what computes. All ranks wait for the slowest, so a node that is much smaller than the others
may have none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
    def here(cls, system: Path = _SYSTEM) -> Machine:
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
            tuple(sorted(cores, key=min_of)),
            cpu_quota(),
        )


@dataclass(frozen=True)
class Share:
    """What one of several processes computes on.

    Attributes:
        processors: those it runs on.
        threads: how many of its threads compute.
        is_crowded: others run on the same processors, or the container's time does not last for one each.
    """

    processors: Processors
    threads: int
    is_crowded: bool


def deal(machine: Machine, count: int) -> list[Share]:
    """Deals a machine's processors among `count` processes that compute at the same time."""
    nodes = _nodes(machine)
    num_cores = sum(map(len, nodes))
    time = num_cores if machine.quota is None else max(1, min(num_cores, math.ceil(machine.quota)))
    if count > num_cores:
        shares = [machine.allowed] * count
    elif count < len(nodes):
        shares = [_joined(core for node in few for core in node) for few in _nodes_of_each(nodes, count)]
    else:
        numbers = _numbers_of_each([len(node) for node in nodes], count)
        shares = [_joined(part) for node, ranks in zip(nodes, numbers, strict=True) for part in _parts(node, ranks)]
    in_time = max(1, time // count)
    return [
        Share(share, min(in_time, sum(core <= share for node in nodes for core in node)), count > time)
        for share in shares
    ]


def crowding(machine: Machine, count: int) -> str | None:
    """What to tell whoever has more processes compute than there are processors; None: there are enough."""
    if not deal(machine, count)[0].is_crowded:
        return None
    num_cores = sum(map(len, _nodes(machine)))
    has = f"{num_cores} cores" + (f" and time for {machine.quota:g}" if machine.quota is not None else "")
    return (
        f"{count} ranks share {has}: what comes out is right, but slow to come; "
        "give them more processors, or ask for fewer ranks"
    )


def bind(share: Share) -> None:
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


def min_of(processors: Processors) -> int:
    """The first of them; before all others where there is none."""
    return min(processors, default=-1)


def _read(file: Path) -> Processors:
    try:
        return parse_cpulist(file.read_text())
    except (OSError, ValueError):
        return frozenset()


def _nodes(machine: Machine) -> list[list[Processors]]:
    """Cores by node, of those that are allowed: none is empty, none lies in two nodes."""
    left, nodes = set(machine.allowed), []
    for node in (*machine.nodes, machine.allowed):
        here = left & node
        left -= here
        if here:
            nodes.append(_cores(here, machine.cores))
    return nodes


def _cores(processors: set[int], cores: Sequence[Processors]) -> list[Processors]:
    left, found = set(processors), []
    for core in (*cores, *(frozenset({number}) for number in sorted(processors))):
        if threads := core & left:
            left -= threads
            found.append(frozenset(threads))
    return sorted(found, key=min_of)


def _nodes_of_each(nodes: list[list[Processors]], count: int) -> list[list[list[Processors]]]:
    """Whole nodes for fewer ranks: the largest first, each to who has the fewest cores."""
    dealt: list[list[list[Processors]]] = [[] for _ in range(count)]
    for node in sorted(nodes, key=len, reverse=True):
        min(dealt, key=lambda few: sum(map(len, few))).append(node)
    return dealt


def _numbers_of_each(sizes: list[int], count: int) -> list[int]:
    """How many ranks each node has, no more than its cores: each goes where it gets the most of them (D'Hondt), and
    of such nodes where there is none yet."""
    numbers = [0] * len(sizes)
    for _ in range(count):
        numbers[max(range(len(sizes)), key=lambda node: (sizes[node] / (numbers[node] + 1), -numbers[node]))] += 1
    return numbers


def _parts(cores: list[Processors], count: int) -> list[list[Processors]]:
    """Neighbouring cores for each of `count` ranks, as even as can be."""
    return [cores[len(cores) * i // count : len(cores) * (i + 1) // count] for i in range(count)]


def _joined(cores: Iterable[Processors]) -> Processors:
    return frozenset().union(*cores)
