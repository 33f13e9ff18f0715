"""Ranks of another node die, stop, hang; so does its agent; strangers come: who waits is told what happened, and where.

Real: the executor, the head, the agent, the processes, TCP on this machine. Faked: the model, as in
`exec.crashing_rank`, of which two ranks are here and one there.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import re
import signal
import socket
import threading
import types
from array import array
from collections.abc import Callable, Iterator
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
from stoker_engine.core.step import Step
from stoker_engine.exec.rank_executor import RankExecutor
from stoker_engine.exec.supervision import Supervision
from stoker_engine.nodes import node_info
from stoker_engine.nodes.connection import NodeConnection
from stoker_engine.nodes.handshake import greet_head
from stoker_engine.nodes.head import Head
from stoker_engine.parallel.rendezvous import rendezvous_at
from stoker_engine.processes import node_agent
from stoker_engine.processes.node_agent import NodeAgent

from ...support.waiting import until

PROGRAM = Path(__file__).parents[1] / "exec" / "crashing_rank.py"
#: Ranks 0 … 3 of one engine; the last two are on node 1.
SIZE, REMOTE, STEP_TIMEOUT_S = 4, 2, 20.0


@dataclasses.dataclass
class Agent:
    """One that runs in a thread of this process, and how that ended."""

    agent: NodeAgent
    thread: threading.Thread
    error: list[BaseException]

    def end(self) -> BaseException | None:
        self.thread.join(100)
        assert not self.thread.is_alive(), "the agent goes on"
        return self.error[0] if self.error else None


class Nodes:
    """What a test starts."""

    def __init__(self, folder: Path) -> None:
        self.deaths, self.model = folder / "deaths", folder / "model"
        self.deaths.mkdir()
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.model / "model.safetensors").write_bytes(b"1234")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.executors: list[RankExecutor] = []
        self.heads: list[Head] = []
        self.agents: list[Agent] = []

    def args(self, **options: Any) -> EngineArgs:
        return EngineArgs(
            **{
                "model": str(self.model),
                "tensor_parallel_size": SIZE,
                "nnodes": 2,
                "master_addr": "127.0.0.1",
                "master_port": self.port,
                "distributed_timeout_seconds": 60,
                **options,
            },
        )

    def plan(self, *deaths: tuple[str, int, str]) -> None:
        for point, rank, how in deaths:
            (self.deaths / f"{point}-{rank}").write_text(how)

    def forget(self) -> None:
        """Ranks that are started from now on live."""
        for file in self.deaths.iterdir():
            file.unlink()

    def agent(self, **options: Any) -> Agent:
        agent = NodeAgent(self.args(**{"node_rank": 1, **options}), program=(str(PROGRAM), str(self.deaths)))
        errors: list[BaseException] = []

        def run() -> None:
            try:
                agent.run()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.agents.append(Agent(agent, thread, errors))
        return self.agents[-1]

    def head(self, engine: int = 0, on_waiting: Callable[[str], None] = lambda _: None, **options: Any) -> Head:
        self.heads.append(Head(self.args(**options), self.model, engine, on_waiting))
        return self.heads[-1]

    def executor(self, engine: int = 0, **options: Any) -> RankExecutor:
        args, checkpoint = self.args(**options), types.SimpleNamespace(path=self.model)
        head = self.head(engine, **options)
        executor = RankExecutor(
            args,
            checkpoint,  # type: ignore[arg-type]
            head=head,
            supervision=Supervision(STEP_TIMEOUT_S),
            program=(str(PROGRAM), str(self.deaths)),
        )
        self.executors.append(executor)
        return executor

    def process(self, rank: int) -> psutil.Process:
        """A rank's; the agent's ranks are this process's children too."""
        (found,) = (
            child
            for child in psutil.Process().children()
            if str(PROGRAM) in (words := child.cmdline()) and words[3] == str(rank)
        )
        return found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """At the end no process, thread of an agent or descriptor is left."""
    with rendezvous_at("127.0.0.1"):  # the first of a process leaves two descriptors of libuv's behind
        pass
    before, open_files = set(psutil.Process().children(recursive=True)), psutil.Process().num_fds()
    made = Nodes(tmp_path)
    yield made
    for executor in made.executors:
        executor.shutdown()
    for head in made.heads:
        head.close()
    for agent in made.agents:
        agent.agent.stop("the end of a test")
        agent.end()
    made.agents.clear()
    assert set(psutil.Process().children(recursive=True)) <= before
    gc.collect()
    _until(lambda: psutil.Process().num_fds() <= open_files, "descriptors are left open", 5)


def _until(condition: Callable[[], bool], otherwise: str, timeout_s: float = 30) -> None:
    until(condition, otherwise)


def _step(number: int) -> Step:
    return Step(number, *(array("i") for _ in range(4)), num_decodes=0, num_tokens=0)


def _run(executor: RankExecutor, steps: int) -> None:
    for number in range(steps):
        executor.launch(_step(number))
        executor.collect()


def _no_ranks() -> bool:
    return not [child for child in psutil.Process().children() if str(PROGRAM) in child.cmdline()]


def test_steps_come_back_and_all_end_together(nodes: Nodes) -> None:
    agent = nodes.agent()
    executor = nodes.executor()
    plan: Any = executor.plan
    assert plan.model == str(nodes.model)
    executor.launch(_step(0))
    for number in range(1, 50):
        executor.launch(_step(number))
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
def test_one_ends_and_all_do_and_then_live_again(point: str, rank: int, how: str, nodes: Nodes) -> None:
    kind, words = HOWS[how]
    nodes.plan((point, rank, how))
    agent = nodes.agent()
    executor: RankExecutor | None = None
    with pytest.raises(EngineDeadError, match=words) as ended:
        executor = nodes.executor()
        _run(executor, 6)
    assert type(ended.value) is kind
    where = rf"rank {rank} of {SIZE}" + (r" on node 1 \(127.0.0.1\)" if rank >= REMOTE else " (?!on)")
    assert re.search(where, str(ended.value))
    _until(_no_ranks, "a rank lives on")
    if executor is not None:
        executor._close()  # as its process would have ended
    nodes.forget()
    again = nodes.executor()
    _run(again, 3)
    again.shutdown()
    assert agent.end() is None


@pytest.mark.parametrize("rank", [0, REMOTE])
@pytest.mark.parametrize("how, kind", [("argument", ArgumentError), ("model", WeightsError)])
def test_what_cannot_be_served_ends_the_node_too(how: str, kind: type[StokerError], rank: int, nodes: Nodes) -> None:
    nodes.plan(("load", rank, how))
    agent = nodes.agent()
    with pytest.raises(kind, match="planned") as refused:
        nodes.executor()
    assert type(refused.value) is kind
    error = agent.end()
    assert isinstance(error, ModelError) and "node 0 could not serve" in str(error) and "planned" in str(error)


def test_the_agent_is_asked_to_end(nodes: Nodes) -> None:
    agent = nodes.agent()
    executor = nodes.executor()
    _run(executor, 2)
    agent.agent.stop("SIGTERM")
    assert agent.end() is None
    with pytest.raises(EngineKilledError, match=rf"rank 2 of {SIZE} on node 1 .*asked to end \(SIGTERM\)"):
        _run(executor, 1_000_000)
    _until(_no_ranks, "a rank lives on")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_killed_at_any_moment(seed: int, nodes: Nodes) -> None:
    chance = random.Random(seed)
    nodes.agent()
    executor, rank = nodes.executor(), chance.randrange(REMOTE, SIZE)
    signum = chance.choice((signal.SIGKILL, signal.SIGSEGV))
    threading.Timer(chance.random() / 5, os.kill, (nodes.process(rank).pid, signum)).start()
    with pytest.raises(EngineDeadError, match=f"rank {rank} of {SIZE} on node 1 .*{signum.name}"):
        _run(executor, 1_000_000)
    _until(_no_ranks, "a rank lives on")


def test_the_head_first_and_strangers_meanwhile_and_after(nodes: Nodes) -> None:
    """Random bytes, connections that say nothing, half a greeting, lengths that no message has: none of them hurts."""
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
        _until(lambda: _listens(nodes.port), "the head does not listen")
        disturb()
        nodes.agent()

    beginning = threading.Thread(target=begin)
    beginning.start()
    executor = nodes.executor()
    beginning.join()
    disturb()
    _run(executor, 5)
    for stranger in strangers:
        stranger.close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


#: What JSON can hold and no node says, once it has shown that it knows the key.
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


def test_nonsense_of_who_knows_the_key(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """It is hung up on, and other nodes come as before."""
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
    _until(lambda: all(thread.name != "node" for thread in threading.enumerate()), "a thread waits for nobody")
    nodes.agent()
    assert list(head.nodes()) == [1]


def test_a_node_that_leaves_and_comes_back_while_others_are_awaited(nodes: Nodes) -> None:
    four: dict[str, Any] = {"nnodes": 4}
    words: list[str] = []
    head = nodes.head(on_waiting=words.append, **four)
    waiting = threading.Thread(target=lambda: words.append(f"all: {sorted(head.nodes())}"))
    waiting.start()

    def waits_for(numbers: str) -> Callable[[], bool]:
        sentence = f"waiting for {numbers} of 4 at 127.0.0.1:{nodes.port}, until "
        return lambda: bool(words) and words[-1].startswith(sentence)

    _until(waits_for("nodes 1, 2, 3"), "it does not say for whom it waits")
    nodes.agent(node_rank=2, **four)
    first = nodes.agent(node_rank=1, **four)
    _until(waits_for("node 3"), "it does not say for whom it waits")
    first.agent.stop("SIGTERM")
    assert first.end() is None
    _until(waits_for("nodes 1, 3"), "who has left is not missed")
    nodes.agent(node_rank=3, **four)
    nodes.agent(node_rank=1, **four)
    waiting.join(120)
    assert words[-2:] == ["", "all: [1, 2, 3]"]


def test_who_is_about_to_come_hears_why_it_is_of_no_use(nodes: Nodes) -> None:
    head, agent = nodes.head(), nodes.agent()
    head.dismiss("a planned lack")
    assert re.search("node 0 could not serve: a planned lack", str(agent.end()))


def test_an_engine_that_cannot_be_served_takes_no_other_with_it(nodes: Nodes) -> None:
    """Node 1 has a rank of engine 1, and all of engine 2."""
    three: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 3}
    agent, serves = nodes.agent(**three), nodes.executor(engine=2, **three)
    for _ in range(2):
        head = nodes.head(engine=1, **three)
        assert list(head.nodes()) == [1]
        head.dismiss("a planned lack")
        head.close()
        _run(serves, 3)
    serves.shutdown()
    assert re.search("node 0 could not serve: a planned lack", str(agent.end()))


def test_an_agent_ends_whatever_it_is_at(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
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
        raise WeightsError("nobody hears of this")

    monkeypatch.setattr(node_agent, "locate_model", download)
    agent = nodes.agent()
    assert looks.wait(120)
    agent.agent.stop("SIGTERM")
    assert agent.end() is None
    never.set()


def test_a_second_node_of_the_same_number_waits(nodes: Nodes) -> None:
    nodes.agent()
    executor = nodes.executor()
    second = nodes.agent(distributed_timeout_seconds=2)
    error = second.end()
    assert isinstance(error, EngineDeadError) and "node 1 (127.0.0.1) is there already" in str(error)
    _run(executor, 3)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_num_seqs": 7}, r"--max-num-seqs: .*256 on node 0, but 7 on node 1"),
        ({"nnodes": 4, "node_rank": 1}, r"--nnodes: .*2 on node 0, but 4 on node 1"),
    ],
)
def test_nodes_must_have_the_same_arguments(options: dict[str, Any], words: str, nodes: Nodes) -> None:
    agent = nodes.agent(**options)
    with pytest.raises(ArgumentError, match=words.replace(".*", "")):
        nodes.executor()
    error = agent.end()
    assert isinstance(error, ArgumentError) and re.search(words, str(error))


def test_what_only_the_head_schedules_by_may_differ(nodes: Nodes) -> None:
    """`LLM` on the head, which is offline, and ``stoker serve --headless`` elsewhere differ in it."""
    nodes.agent(long_prefill_token_threshold=0)
    executor = nodes.executor()
    _run(executor, 2)


def test_nodes_must_have_the_same_version_and_model(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    other_model = nodes.model.with_name("other")
    other_model.mkdir()
    (other_model / "config.json").write_text('{"x": 1}')
    agent = nodes.agent(model=str(other_model))
    with pytest.raises(ArgumentError, match="MODEL: the files on node 1"):
        nodes.executor()
    assert isinstance(agent.end(), ArgumentError)
    own_version = node_info.version("stoker")
    versions = iter([own_version, "0.0.1"])  # the head's is read first
    monkeypatch.setattr(node_info, "version", lambda _: next(versions))
    threading.Timer(0.5, nodes.agent).start()
    with pytest.raises(ArgumentError, match=f"has Stoker 0.0.1, and node 0 has {own_version}"):
        nodes.executor()


def test_another_key(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head goes on waiting for a node with the right one."""
    monkeypatch.setenv("STOKER_NODE_KEY", "the right one")
    found: list[BaseException | None] = []

    def begin() -> None:
        _until(lambda: _listens(nodes.port), "the head does not listen")
        for key in ("the wrong one", ""):
            monkeypatch.setenv("STOKER_NODE_KEY", key)
            found.append(nodes.agent().end())
        monkeypatch.setenv("STOKER_NODE_KEY", "the right one")
        nodes.agent()

    beginning = threading.Thread(target=begin)
    beginning.start()
    executor = nodes.executor()
    beginning.join()
    _run(executor, 3)
    assert len(found) == 2
    for error in found:
        assert isinstance(error, ArgumentError) and "STOKER_NODE_KEY: node 0 at 127.0.0.1" in str(error)


def test_nodes_that_do_not_come(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        EngineDeadError,
        match=r"node 1 of 2 did not come to .*:[0-9]+ within 1 s \(--distributed-t",
    ):
        nodes.executor(distributed_timeout_seconds=1)
    error = nodes.agent(distributed_timeout_seconds=1).end()
    assert isinstance(error, EngineDeadError)
    assert re.search(rf"node 0 at 127.0.0.1:{nodes.port} could not be reached .*Connection refused", str(error))


def test_a_node_that_comes_while_the_head_goes(nodes: Nodes) -> None:
    """It is hung up on, and not taken in by a head that will never end it."""
    head = nodes.head()
    line = NodeConnection(socket.create_connection(("127.0.0.1", nodes.port), 120))
    try:
        greet_head(line, b"")
        head.close()
        line.wait_at_most(120)
        with pytest.raises((EOFError, ConnectionError)):
            line.send(
                node=1, path="", **dataclasses.asdict(node_info.NodeInfo.of(nodes.args(node_rank=1), nodes.model))
            )
            line.receive()
    finally:
        line.close()


def test_a_port_that_is_taken(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_engine.nodes.head._PORT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", nodes.port)),
        pytest.raises(ArgumentError, match=f"--master-port: node 0 cannot listen on 127.0.0.1:{nodes.port}: .*in use"),
    ):
        nodes.executor()


def test_only_node_0_runs_an_engine(nodes: Nodes) -> None:
    with pytest.raises(ArgumentError, match="--node-rank: node 0 runs the engine"):
        Head.of(nodes.args(node_rank=1), nodes.model)
