"""Ranks as threads of one process: their computation is real, their communication is simulated.

They are cheap where transport does not matter: no process starts and imports torch. All communication uses one board,
to which each rank of a group writes its input of an operation, and then waits for the others.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.proposer import Proposer
from stoker_engine.core.step import Step, StepResult
from stoker_engine.engine import Engine
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.runner import Runner
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.layers.linear_site import ExtendLinear
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.parallel.rank_groups import RankGroups
from stoker_engine.sizing.pipeline_stages import Stage

from .device_steps import sample_on_device

T = TypeVar("T")
TIMEOUT_S = 120.0


class ThreadRanks:
    """See `parallel.communicator.Communicator`.

    Attributes:
        calls: names of the operations so far.
        sizes: bytes of this rank's input to each of them.
    """

    def __init__(self, rank: int, board: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self._board, self._barrier = board, barrier

    @classmethod
    def group(cls, size: int) -> list[ThreadRanks]:
        """Create a group of `size` ranks."""
        board, barrier = [torch.empty(0)] * size, threading.Barrier(size)
        return [cls(rank, board, barrier) for rank in range(size)]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        first, *other_parts = self._exchange(x, "all_reduce")
        total = first.float() if x.dtype in (torch.bfloat16, torch.float16) else first.clone()
        for part in other_parts:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        """See `Communicator`."""
        parts = self._exchange(x, "all_gather")
        assert [part.shape[-1] for part in parts] == list(widths or [x.shape[-1]] * self.size)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return self._exchange(x, "broadcast")[0].clone()

    def abort(self) -> None:
        """Stop the other ranks' waits for this one."""
        self._barrier.abort()

    def _exchange(self, x: torch.Tensor, operation: str) -> list[torch.Tensor]:
        self.calls.append(operation)
        self.sizes.append(x.nbytes)
        self._board[self.rank] = x
        self._barrier.wait(TIMEOUT_S)
        parts = [part.clone() for part in self._board]
        self._barrier.wait(TIMEOUT_S)
        return parts


class ThreadPipeline:
    """See `parallel.rank_groups.Pipeline`.

    Attributes:
        num_sent: number of tensors that this rank has sent.
    """

    def __init__(self, stage: Stage, queues: Sequence[queue.SimpleQueue[torch.Tensor]]) -> None:
        self.stage, self._queues, self.num_sent = stage, queues, 0

    def send(self, x: torch.Tensor) -> None:
        """See `Pipeline`."""
        self.num_sent += 1
        self._queues[self.stage.index + 1].put(x.clone())

    def receive(self, x: torch.Tensor) -> None:
        """See `Pipeline`."""
        sent = self._queues[self.stage.index].get(timeout=TIMEOUT_S)
        assert (sent.shape, sent.dtype, sent.device) == (x.shape, x.dtype, x.device)
        x.copy_(sent)


def thread_groups(layout: RankLayout) -> list[RankGroups]:
    """Return the rank groups of each rank of an engine."""
    engines = ThreadRanks.group(layout.size)
    tensors = [ThreadRanks.group(layout.tensor) for _ in range(layout.pipeline)]
    queues = [[queue.SimpleQueue[torch.Tensor]() for _ in range(layout.pipeline)] for _ in range(layout.tensor)]
    return [
        RankGroups(
            tensors[layout.stage_of(rank).index][layout.place_of(rank)] if layout.tensor > 1 else SingleRank(),
            ThreadPipeline(layout.stage_of(rank), queues[layout.place_of(rank)]),
            engines[rank],
        )
        for rank in range(layout.size)
    ]


class ThreadExecutor:
    """See `exec.executor.Executor`.

    Args:
        extend: extends each rank's model while it is built, see `layers.build.Build.extend`.
        on_device: ranks launch a step before they collect the previous one, as accelerators do.

    Attributes:
        runners: one per rank.
        groups: rank groups of the runners.
    """

    def __init__(
        self, args: EngineArgs, extend: Callable[[], ExtendLinear] | None = None, on_device: bool = False
    ) -> None:
        layout = RankLayout.of(args)
        self.groups = thread_groups(layout)
        self._answering = layout.first_of_last_stage
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(layout.size)]
        self._launched: deque[list[Future[StepResult]]] = deque()
        self._uncollected: deque[list[Future[None]]] = deque()  # on devices, instead

        def load(rank: int) -> Runner:
            return build_runner(
                args,
                find_checkpoint(args),
                groups=self.groups[rank],
                adapt=lambda build: replace(build, extend=extend and extend()),
            )

        self.runners = self._all([pool.submit(load, rank) for rank, pool in enumerate(self._threads)])
        if on_device:
            for runner in self.runners:
                sample_on_device(runner)
        self.plan, self.on_cpu, self.runs_ahead = self.runners[0].plan, True, on_device
        assert all(runner.plan == self.plan for runner in self.runners)

    def launch(self, step: Step) -> None:
        """See `Executor`. Each rank gets its own copy of the step, as if it came through a pipe."""
        of_ranks = list(zip(self._threads, self.runners, strict=True))
        if self.runs_ahead:
            self._uncollected.append([pool.submit(runner.launch, copy.deepcopy(step)) for pool, runner in of_ranks])
        else:
            self._launched.append([pool.submit(runner.run, copy.deepcopy(step)) for pool, runner in of_ranks])

    def collect(self) -> StepResult:
        """See `Executor`. The other ranks may still run."""
        if self.runs_ahead:
            self._collect_on_ranks()
        results = self._launched[0]
        result = self._all(results[self._answering : self._answering + 1])[0]
        self._launched.popleft()
        return result

    def discard_in_flight(self) -> None:
        """See `Executor`."""
        while self._uncollected:
            self._collect_on_ranks()
        while self._launched:
            for result in self._launched.popleft():
                result.exception()

    def _collect_on_ranks(self) -> None:
        """Have each rank collect its oldest step."""

        def collect(runner: Runner, launch: Future[None]) -> StepResult:
            launch.result()
            return runner.collect()

        launches = zip(self._threads, self.runners, self._uncollected.popleft(), strict=True)
        self._launched.append([pool.submit(collect, runner, launch) for pool, runner, launch in launches])

    def set_token_table(self, table: TokenTable) -> None:
        """See `Executor`."""
        for runner in self.runners:
            runner.grammars.set_token_table(table)

    def prepare(self, grammar: Grammar) -> Future[object]:
        """See `Executor`. The compiled grammar stays with the rank that samples."""
        ready = Future[object]()
        made = self.runners[self._answering].grammars.prepare(grammar)
        made.add_done_callback(lambda _: ready.set_exception(e) if (e := made.exception()) else ready.set_result(None))
        return ready

    def shutdown(self) -> None:
        """See `Executor`."""
        for pool in self._threads:
            pool.shutdown()

    def _all(self, futures: Sequence[Future[T]]) -> list[T]:
        """Return results in order. If one fails, stop the waits of the others, and raise its error."""
        for future in futures:
            future.add_done_callback(self._abort_if_failed)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]

    def _abort_if_failed(self, future: Future[object]) -> None:
        if future.exception() is not None:
            for groups in self.groups:
                for ranks in (groups.tensor, groups.engine):
                    if isinstance(ranks, ThreadRanks):
                        ranks.abort()


@contextmanager
def thread_engine(
    args: EngineArgs,
    change: Callable[[ThreadExecutor], None] = lambda _: None,
    proposer: Proposer | None = None,
    on_device: bool = False,
) -> Iterator[Engine]:
    """Create an engine with thread ranks, laid out by `args`.

    Args:
        change: applied to the executor before the engine is created.
        proposer: proposer of draft tokens.
        on_device: see `ThreadExecutor`.
    """
    executor = ThreadExecutor(args, on_device=on_device)
    change(executor)
    try:
        yield Engine(args, find_checkpoint(args), executor=executor, proposer=proposer)
    finally:
        executor.shutdown()
