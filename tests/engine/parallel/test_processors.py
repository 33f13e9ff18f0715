"""Which processors ranks compute on: drawn machines with holes, uneven nodes and hyperthreads; the kernel's files."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from stoker_engine.parallel import processors
from stoker_engine.parallel.processors import Machine, Share, bind, crowding, deal, parse_cpulist


def draw(chance: random.Random) -> Machine:
    """1 – 8 nodes; some processors are offline or forbidden, some nodes have none, some machines name no nodes."""
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
        nodes = nodes[: chance.randrange(num_nodes)]  # the others are not named
    quota = chance.choice((None, None, chance.uniform(0.1, 2 * total)))
    return Machine(allowed, tuple(nodes), tuple(cores) if chance.random() < 0.8 else (), quota)


@pytest.mark.parametrize("seed", range(100))
def test_drawn_machines(seed: int) -> None:
    chance = random.Random(seed)
    machine = draw(chance)
    count = chance.choice((1, 2, 3, 4, 8, 16, 64))
    shares = deal(machine, count)
    siblings = machine.cores or tuple(frozenset({number}) for number in machine.allowed)
    cores = {core & machine.allowed for core in siblings} - {frozenset()}
    assert len(shares) == count
    assert all(share.processors and share.processors <= machine.allowed and share.threads >= 1 for share in shares)
    time = len(cores) if machine.quota is None else min(len(cores), machine.quota)
    assert sum(share.threads for share in shares) <= max(count, time + 1)
    if count > len(cores):
        assert all(share == Share(machine.allowed, 1, True) for share in shares)
        said = crowding(machine, count)
        assert said is not None and f"{count} ranks" in said and f"{len(cores)} cores" in said
        return
    used = frozenset[int]().union(*(share.processors for share in shares))
    assert sum(len(share.processors) for share in shares) == len(used)  # none has two owners
    for share in shares:
        mine = [core for core in cores if core & share.processors]
        assert all(core <= share.processors for core in mine)  # a core's hyperthreads stay together
        assert share.threads <= len(mine)
    named = [node & machine.allowed for node in machine.nodes]
    nodes = [node for node in (*named, machine.allowed.difference(*named)) if node]
    if count >= len(nodes):  # each lies in one node, and ranks of a node have as much, but for one core
        for node in nodes:
            if not node & used:  # it lies idle where a rank on it would have fewer cores than any other one
                idle = sum(core <= node for core in cores)
                assert all(idle <= sum(core <= share.processors for core in cores) for share in shares)
                continue
            assert node <= used
            sizes = [sum(core <= s.processors for core in cores) for s in shares if s.processors & node]
            assert max(sizes) - min(sizes) <= 1
        assert all(any(share.processors <= node for node in nodes) for share in shares)
    else:  # each has whole nodes, and none lies idle
        assert used == machine.allowed
        assert all(node <= share.processors or not node & share.processors for share in shares for node in nodes)


def test_two_sockets() -> None:
    """32 cores with hyperthreads: a socket has 0 – 15 and 32 – 47, the other one the rest."""
    cores = tuple(frozenset({number, number + 32}) for number in range(32))
    nodes = (parse_cpulist("0-15,32-47"), parse_cpulist("16-31,48-63\n"))
    machine = Machine(frozenset(range(64)), nodes, cores)
    assert deal(machine, 2) == [Share(nodes[0], 16, False), Share(nodes[1], 16, False)]
    assert [share.threads for share in deal(machine, 4)] == [8] * 4
    assert deal(machine, 4)[1].processors == parse_cpulist("8-15,40-47")
    assert [share.threads for share in deal(machine, 3)] == [8, 8, 10]
    assert deal(machine, 1) == [Share(machine.allowed, 32, False)]
    limited = Machine(machine.allowed, nodes, cores, quota=6)
    assert [share.threads for share in deal(limited, 2)] == [3, 3]
    assert crowding(limited, 6) is None
    assert "8 ranks share 32 cores and time for 6" in (crowding(limited, 8) or "")


@pytest.mark.parametrize(
    "text, found", [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("\n", set()), ("5", {5}), ("0-0", {0})]
)
def test_lists_of_processors(text: str, found: set[int]) -> None:
    assert parse_cpulist(text) == found


def test_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6})
    monkeypatch.setattr(processors, "cpu_quota", lambda: 2.5)
    for name, cpus in (("node0", "0-1,4-5"), ("node2", "2-3"), ("node10", "6-7"), ("node1", "")):
        (tmp_path / "node" / name).mkdir(parents=True)
        (tmp_path / "node" / name / "cpulist").write_text(cpus + "\n")
    (tmp_path / "node" / "nodelike").mkdir()
    for number, siblings in ((0, "0-1"), (1, "0-1"), (2, "2"), (3, "what")):  # 6 says nothing
        (tmp_path / f"cpu/cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu/cpu{number}/topology/thread_siblings_list").write_text(siblings + "\n")
    machine = Machine.here(tmp_path)
    assert machine.allowed == {0, 1, 2, 3, 6} and machine.quota == 2.5
    assert machine.nodes == tuple(map(parse_cpulist, ("0-1,4-5", "", "2-3", "6-7")))
    assert [share.processors for share in deal(machine, 3)] == [{0, 1}, {2, 3}, {6}]
    nothing = Machine.here(tmp_path / "not there")
    assert nothing.nodes == () and [s.processors for s in deal(nothing, 2)] == [{0, 1}, {2, 3, 6}]


def test_threads_that_are_started_later_are_bound_too() -> None:
    before, found = os.sched_getaffinity(0), []
    try:
        one = min(before)
        bind(Share(frozenset({one}), 1, False))
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert found == [{one}]
        bind(Share(frozenset({max(before) + 500}), 1, False))  # there is none: nothing changes
        assert os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, before)
