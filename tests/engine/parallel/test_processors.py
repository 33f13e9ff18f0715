"""CPUs of ranks: random machines with holes, uneven nodes and hyperthreads; the kernel's files."""

from __future__ import annotations

import math
import os
import random
import threading
from pathlib import Path

import pytest

from stoker_engine.parallel import processors
from stoker_engine.parallel.processors import Machine, ProcessorShare, bind, crowding, deal, parse_cpulist


def draw(chance: random.Random) -> Machine:
    """Draw 1 – 8 nodes; some CPUs are offline or forbidden, some nodes have none, some machines list no nodes."""
    num_nodes, num_cores, threads = chance.randint(1, 8), chance.randint(1, 12), chance.choice((1, 1, 2, 4))
    total = num_nodes * num_cores
    cores = [frozenset(number + total * thread for thread in range(threads)) for number in range(total)]
    nodes = [frozenset[int]().union(*cores[n * num_cores : (n + 1) * num_cores]) for n in range(num_nodes)]
    everything = sorted(frozenset().union(*cores))
    allowed = frozenset(chance.sample(everything, chance.randint(1, len(everything))))
    if chance.random() < 0.5:
        allowed = frozenset(everything)
    if chance.random() < 0.2:
        nodes.insert(chance.randrange(num_nodes), frozenset())  # memory without processors
    if chance.random() < 0.2:
        nodes = nodes[: chance.randrange(num_nodes)]  # the others are not listed
    quota = chance.choice((None, None, chance.uniform(0.1, 2 * total)))
    return Machine(allowed, tuple(nodes), tuple(cores) if chance.random() < 0.8 else (), quota)


@pytest.mark.parametrize("seed", range(100))
def test_random_machines_are_shared_fairly(seed: int) -> None:
    chance = random.Random(seed)
    machine = draw(chance)
    count = chance.choice((1, 2, 3, 4, 8, 16, 64))
    shares = deal(machine, count)
    cores = {core & machine.allowed for core in machine.cores} - {frozenset()}
    cores |= {frozenset({number}) for number in machine.allowed.difference(*cores)}
    assert len(shares) == count
    assert all(share.processors and share.processors <= machine.allowed and share.threads >= 1 for share in shares)
    time = len(cores) if machine.quota is None else min(len(cores), max(1, math.ceil(machine.quota)))
    assert sum(share.threads for share in shares) <= max(count, time)
    if count > time:
        assert all(share == ProcessorShare(machine.allowed, 1, True) for share in shares)
        warning = crowding(machine, count)
        assert warning is not None and f"{count} ranks" in warning and f"{len(cores)} cores" in warning
        return
    assert crowding(machine, count) is None and not any(share.is_crowded for share in shares)
    named = [node & machine.allowed for node in machine.nodes]
    nodes = [node for node in (*named, machine.allowed.difference(*named)) if node]
    for share in shares:  # whole nodes
        assert all(node <= share.processors or not node & share.processors for node in nodes)
    for node in nodes:  # its threads have a core each
        on_it = [share for share in shares if share.processors == node]
        assert sum(share.threads for share in on_it) <= sum(bool(core & node) for core in cores)
    used = frozenset[int]().union(*(share.processors for share in shares))
    if count >= len(nodes):
        assert all(share.processors in nodes for share in shares)
        for node in nodes:  # a node is idle only if a rank on it would have fewer cores than all others
            if not node & used:
                idle = sum(bool(core & node) for core in cores)
                for other in nodes:
                    ranks = sum(share.processors == other for share in shares)
                    assert idle * ranks <= sum(bool(core & other) for core in cores)
    else:  # no node has two owners, and none is idle
        assert used == machine.allowed
        assert sum(len(share.processors) for share in shares) == len(used)


def test_two_sockets_are_shared_by_nodes() -> None:
    """32 cores with hyperthreads: one socket has 0 – 15 and 32 – 47, the other the rest."""
    cores = tuple(frozenset({number, number + 32}) for number in range(32))
    nodes = (parse_cpulist("0-15,32-47"), parse_cpulist("16-31,48-63\n"))
    machine = Machine(frozenset(range(64)), nodes, cores)
    assert deal(machine, 2) == [ProcessorShare(nodes[0], 16, False), ProcessorShare(nodes[1], 16, False)]
    assert [share.threads for share in deal(machine, 4)] == [8] * 4
    assert [share.processors for share in deal(machine, 4)] == [nodes[0], nodes[0], nodes[1], nodes[1]]
    assert [share.threads for share in deal(machine, 3)] == [8, 8, 10]
    assert deal(machine, 1) == [ProcessorShare(machine.allowed, 32, False)]
    limited = Machine(machine.allowed, nodes, cores, quota=6)
    assert [share.threads for share in deal(limited, 2)] == [3, 3]
    assert crowding(limited, 6) is None
    assert "8 ranks share 32 cores with a CPU limit of 6" in (crowding(limited, 8) or "")


@pytest.mark.parametrize(
    "text, found", [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("\n", set()), ("5", {5}), ("0-0", {0})]
)
def test_cpu_lists_are_parsed(text: str, found: set[int]) -> None:
    assert parse_cpulist(text) == found


def test_machine_is_read_from_the_kernels_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6})
    monkeypatch.setattr(processors, "cpu_quota", lambda: 2.5)
    for name, cpus in (("node0", "0-1,4-5"), ("node2", "2-3"), ("node10", "6-7"), ("node1", "")):
        (tmp_path / "node" / name).mkdir(parents=True)
        (tmp_path / "node" / name / "cpulist").write_text(cpus + "\n")
    (tmp_path / "node" / "nodelike").mkdir()
    for number, siblings in ((0, "0-1"), (1, "0-1"), (2, "2"), (3, "what")):  # CPU 6 has no file
        (tmp_path / f"cpu/cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{number}/topology/thread_siblings_list").write_text(siblings + "\n")
    machine = Machine.current(tmp_path)
    assert machine.allowed == {0, 1, 2, 3, 6} and machine.quota == 2.5
    assert machine.nodes == tuple(map(parse_cpulist, ("0-1,4-5", "", "2-3", "6-7")))
    # 4 cores, and time for 3 of them: the core of hyperthreads is one
    assert [(share.processors, share.threads) for share in deal(machine, 3)] == [({0, 1}, 1), ({2, 3}, 1), ({6}, 1)]
    nothing = Machine.current(tmp_path / "not there")
    assert nothing.nodes == () and deal(nothing, 2) == [ProcessorShare(machine.allowed, 1, False)] * 2


def test_threads_started_later_are_also_bound() -> None:
    before, found = os.sched_getaffinity(0), []
    try:
        one = min(before)
        bind(ProcessorShare(frozenset({one}), 1, False))
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert found == [{one}]
        bind(ProcessorShare(frozenset({max(before) + 500}), 1, False))  # no such CPU: nothing changes
        assert os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, before)
