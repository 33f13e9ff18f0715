"""Ranks of another node die, stop or hang; so does its agent; strangers connect: waiting requests get the cause and the
node.

Real: the executor, the head, the agent, the processes, TCP on this machine. Faked: the model, as in
`exec.crashing_rank`, of which two ranks are local and one is remote.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker_common.errors import (
    ArgumentError,
    EngineDeadError,
    EngineKilledError,
    EngineOutOfMemoryError,
    EngineStuckError,
    ModelError,
    StokerError,
    WeightsError,
)
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec.rank_executor import RankExecutor
from stoker_engine.nodes.connection import NodeConnection
from stoker_engine.nodes.handshake import greet_head
from stoker_engine.processes import node_agent

from ...support.processes import command_line
from ...support.waiting import until
from .conftest import (
    PROGRAM,
    REMOTE,
    SIZE,
    Nodes,
    empty_step,
    is_listening,
    run_steps,
)


def _no_ranks() -> bool:
    return not [child for child in psutil.Process().children() if str(PROGRAM) in command_line(child)]


def test_results_come_in_order_and_ranks_end_together(nodes: Nodes) -> None:
    agent = nodes.agent()
    executor = nodes.executor()
    plan: Any = executor.plan
    assert plan.model == str(nodes.model)
    executor.launch(empty_step(0))
    for number in range(1, 50):
        executor.launch(empty_step(number))
        assert executor.collect().sampled[0].token_ids == [list(range(number))]
    executor.shutdown()
    assert agent.end() is None
    assert _no_ranks()


HOWS: dict[str, tuple[type[EngineDeadError], str]] = {
    "9": (EngineKilledError, "SIGKILL"),
    "11": (EngineDeadError, "SIGSEGV"),
    "19": (EngineStuckError, "stopped"),
    "raise": (EngineDeadError, "ZeroDivisionError: a planned death"),
    "memory": (EngineOutOfMemoryError, "MemoryError"),
    "exit": (EngineDeadError, "exit code 3"),
    "hang": (EngineStuckError, " s$"),
}
QUICK = {("step", REMOTE, "9"), ("after", 3, "raise")}


@pytest.mark.parametrize(
    "point, rank, how",
    [
        pytest.param(point, rank, how, marks=() if (point, rank, how) in QUICK else pytest.mark.slow)
        for point in ("load", "step", "after")
        for rank in (0, REMOTE, 3)
        for how in HOWS
    ],
)
def test_all_ranks_end_when_one_dies_and_can_be_restarted(point: str, rank: int, how: str, nodes: Nodes) -> None:
    kind, words = HOWS[how]
    nodes.plan((point, rank, how))
    agent = nodes.agent()
    executor: RankExecutor | None = None
    with pytest.raises(EngineDeadError, match=words) as ended:
        executor = nodes.executor()
        run_steps(executor, 6)
    assert type(ended.value) is kind
    where = rf"rank {rank} of {SIZE}" + (r" on node 1 \(127.0.0.1\)" if rank >= REMOTE else " (?!on)")
    assert re.search(where, str(ended.value))
    until(_no_ranks, "all ranks have ended")
    if executor is not None:
        executor._close()  # as if its process had ended
    nodes.forget()
    again = nodes.executor()
    run_steps(again, 3)
    again.shutdown()
    assert agent.end() is None


@pytest.mark.parametrize("rank", [0, REMOTE])
@pytest.mark.parametrize("how, kind", [("argument", ArgumentError), ("model", WeightsError)])
def test_a_failed_load_ends_the_node_too(how: str, kind: type[StokerError], rank: int, nodes: Nodes) -> None:
    nodes.plan(("load", rank, how))
    agent = nodes.agent()
    with pytest.raises(kind, match="planned") as refused:
        nodes.executor()
    assert type(refused.value) is kind
    error = agent.end()
    assert isinstance(error, ModelError) and "node 0 could not serve" in str(error) and "planned" in str(error)


def test_stopping_the_agent_ends_its_ranks_and_is_reported(nodes: Nodes) -> None:
    agent = nodes.agent()
    executor = nodes.executor()
    run_steps(executor, 2)
    agent.agent.stop("SIGTERM")
    assert agent.end() is None
    with pytest.raises(EngineKilledError, match=rf"rank 2 of {SIZE} on node 1 .*asked to end \(SIGTERM\)"):
        run_steps(executor, 1_000_000)
    until(_no_ranks, "all ranks have ended")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_a_remote_rank_killed_at_any_moment_is_named(seed: int, nodes: Nodes) -> None:
    chance = random.Random(seed)
    nodes.agent()
    executor, rank = nodes.executor(), chance.randrange(REMOTE, SIZE)
    signum = chance.choice((signal.SIGKILL, signal.SIGSEGV))
    threading.Timer(chance.random() / 5, os.kill, (nodes.process(rank).pid, signum)).start()
    with pytest.raises(EngineDeadError, match=f"rank {rank} of {SIZE} on node 1 .*{signum.name}"):
        run_steps(executor, 1_000_000)
    until(_no_ranks, "all ranks have ended")


def test_connections_of_strangers_have_no_effect(nodes: Nodes) -> None:
    """Random bytes, silent connections, half a handshake, invalid lengths: none has an effect."""
    chance = random.Random(0)
    strangers: list[socket.socket] = []

    def disturb() -> None:
        for number in range(100):
            stranger = socket.create_connection(("127.0.0.1", nodes.port))
            strangers.append(stranger)
            match number % 4:
                case 0:
                    stranger.sendall(chance.randbytes(chance.randrange(1, 5000)))
                case 1:
                    stranger.sendall(b"\x00\x00\x00\x40" + chance.randbytes(64))
                case 2:
                    stranger.sendall(b"\x00\x00\x00\x40half")
            if number % 3 == 0:
                stranger.close()

    def begin() -> None:
        until(lambda: is_listening(nodes.port), "the head listens")
        disturb()
        nodes.agent()

    beginning = threading.Thread(target=begin)
    beginning.start()
    executor = nodes.executor()
    beginning.join()
    disturb()
    run_steps(executor, 5)
    for stranger in strangers:
        stranger.close()


#: Valid JSON that no node sends, after authentication with the key.
NONSENSE = [
    "[]",
    "null",
    "7",
    "{}",
    "[" * 60_000,
    '{"node": Infinity}',
    '{"node": NaN, "rank": -Infinity}',
    '{"node": 1e999, "rank": 2}',
    '{"node": "1", "rank": "two"}',
    '{"node": 1, "rank": 99}',
    '{"node": 99, "rank": 2}',
    '{"node": [1], "arguments": {}}',
    '{"node": ' + "9" * 5000 + "}",
    "\xff\ufffd",
]


def test_invalid_messages_after_authentication_close_the_connection(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is closed, and other nodes are admitted as before."""
    head = nodes.head()
    for nonsense in NONSENSE:
        line = NodeConnection(socket.create_connection(("127.0.0.1", nodes.port)))
        line.wait_at_most(120)
        greet_head(line, b"")
        line.send_bytes(nonsense.encode())
        with pytest.raises((EOFError, ConnectionResetError)):
            while "refused" in line.receive():
                pass
        line.close()
    until(lambda: all(thread.name != "node" for thread in threading.enumerate()), "the node's thread has ended")
    nodes.agent()
    assert list(head.nodes()) == [1]


def test_second_connection_of_a_rank_is_refused(nodes: Nodes) -> None:
    nodes.agent()
    executor = nodes.executor()
    line = NodeConnection(socket.create_connection(("127.0.0.1", nodes.port)))
    line.wait_at_most(120)
    greet_head(line, b"")
    line.send(node=1, rank=REMOTE)
    assert line.receive()["refused"] == f"rank {REMOTE} of node 1 is not expected"
    line.close()
    run_steps(executor, 2)


def test_a_node_may_leave_and_return_while_others_are_awaited(nodes: Nodes) -> None:
    four: dict[str, Any] = {"nnodes": 4}
    words: list[str] = []
    head = nodes.head(on_waiting=words.append, **four)
    waiting = threading.Thread(target=lambda: words.append(f"all: {sorted(head.nodes())}"))
    waiting.start()

    def waits_for(numbers: str) -> Callable[[], bool]:
        sentence = f"waiting for {numbers} of 4 at 127.0.0.1:{nodes.port}, until "
        return lambda: bool(words) and words[-1].startswith(sentence)

    until(waits_for("nodes 1, 2, 3"), "the head reports the missing nodes")
    nodes.agent(node_rank=2, **four)
    first = nodes.agent(node_rank=1, **four)
    until(waits_for("node 3"), "the head reports the missing nodes")
    first.agent.stop("SIGTERM")
    assert first.end() is None
    until(waits_for("nodes 1, 3"), "the head reports that the node left")
    nodes.agent(node_rank=3, **four)
    nodes.agent(node_rank=1, **four)
    waiting.join(120)
    assert words[-2:] == ["", "all: [1, 2, 3]"]


def test_a_connecting_node_learns_why_the_head_cannot_serve(nodes: Nodes) -> None:
    head, agent = nodes.head(), nodes.agent()
    head.dismiss("a planned lack")
    assert re.search("node 0 could not serve: a planned lack", str(agent.end()))


def test_a_failed_engine_does_not_end_others(nodes: Nodes) -> None:
    """Node 1 has a rank of engine 1, and all of engine 2."""
    three: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 3}
    agent, serves = nodes.agent(**three), nodes.executor(engine=2, **three)
    for _ in range(2):
        head = nodes.head(engine=1, **three)
        assert list(head.nodes()) == [1]
        head.dismiss("a planned lack")
        head.close()
        run_steps(serves, 3)
    serves.shutdown()
    assert re.search("node 0 could not serve: a planned lack", str(agent.end()))


def test_an_agent_can_be_stopped_while_connecting_or_downloading(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "_GREETING_S", 1000.0)
    with socket.create_server(("127.0.0.1", nodes.port)) as silent:
        agent = nodes.agent()
        there, _ = silent.accept()
        agent.agent.stop("SIGTERM")
        assert agent.end() is None
        there.close()
    looks, never = threading.Event(), threading.Event()

    def download(_: EngineArgs) -> Path:
        looks.set()
        never.wait()
        raise WeightsError("not reported to the node")

    monkeypatch.setattr(node_agent, "locate_model", download)
    agent = nodes.agent()
    assert looks.wait(120)
    agent.agent.stop("SIGTERM")
    assert agent.end() is None
    never.set()
