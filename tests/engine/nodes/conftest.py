"""Heads, agents and executors whose ranks run a fake model (`exec.crashing_rank`), all on this machine."""

from __future__ import annotations

import dataclasses
import gc
import socket
import threading
import types
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.step import Step
from stoker_engine.exec.rank_executor import RankExecutor
from stoker_engine.exec.supervision import Supervision
from stoker_engine.nodes.head import Head
from stoker_engine.parallel.rendezvous import rendezvous_at
from stoker_engine.processes.node_agent import NodeAgent

from ...support.processes import command_line
from ...support.waiting import until

PROGRAM = Path(__file__).parents[1] / "exec" / "crashing_rank.py"
#: Ranks 0 … 3 of one engine; the last two are on node 1.
SIZE, REMOTE, STEP_TIMEOUT_S = 4, 2, 20.0


@dataclasses.dataclass
class Agent:
    """An agent in a thread of this process, with its result."""

    agent: NodeAgent
    thread: threading.Thread
    error: list[BaseException]

    def end(self) -> BaseException | None:
        self.thread.join(100)
        assert not self.thread.is_alive(), "the agent does not end"
        return self.error[0] if self.error else None


class Nodes:
    """The processes and agents that a test starts."""

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
        """Remove all planned deaths."""
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
        """Return a rank's process; the agent's ranks are also this process's children."""
        (found,) = (
            child
            for child in psutil.Process().children()
            if str(PROGRAM) in (words := command_line(child)) and words[3] == str(rank)
        )
        return found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """At the end no process, agent thread or descriptor may be left."""
    with rendezvous_at("127.0.0.1"):  # the first one of a process leaves two libuv descriptors open
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
    until(lambda: psutil.Process().num_fds() <= open_files, "descriptors are closed")


def empty_step(number: int) -> Step:
    return Step(number, *(array("i") for _ in range(4)), num_decodes=0, num_tokens=0)


def run_steps(executor: RankExecutor, steps: int) -> None:
    for number in range(steps):
        executor.launch(empty_step(number))
        executor.collect()


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
