"""Steps run by several processes at once, each of which computes its part of the model.

    Engine ─► RankExecutor ──── steps ──┬─► rank 0: Runner ──► results ─► Engine
                                        │      ↕ sums, tokens (parallel.groups)
                                        └─► rank 1: Runner

Every rank gets every step, as the scheduler here wrote it, and computes it with its part of the weights. One of them
samples, and answers.

Ranks live and die together. When one ends, a thread that waits for nothing else ends the others, also while no step
runs; what the last words and exit codes of all say was the first cause is raised by whatever call comes next. A rank
that is stopped, or that others wait for in vain, is ended the same way.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stoker_engine.children.lifeline import wait_for_hangup
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import EngineDeadError, EngineStuckError, StokerError
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.step import Step, StepResult
from stoker_engine.exec.rank_messages import Loaded, Progress, Setup
from stoker_engine.exec.rank_process import PROGRAM, RankProcess
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.parallel.layout import Layout

if TYPE_CHECKING:
    from stoker_engine.exec.kv_cache import KVCachePlan
    from stoker_engine.models.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between two looks at ranks that do not answer, and how long one may be stopped meanwhile.
_LOOK_S: Final = 1.0
_STOPPED_S: Final = 3.0

#: Seconds in which ranks that lost another end by themselves, and those in which they do when asked to.
_GRACE_S: Final = 1.0
_CLOSE_S: Final = 5.0


class RankExecutor:
    """See `exec.executor.Executor`. It returns once all ranks have loaded.

    Args:
        args: the engine's, which say how many ranks there are, and how they share the model.
        checkpoint: the model, whose files every rank reads its part of.
        on_progress: called whenever loading gets on, in any rank.
        timeout_s: how long a rank waits for another one, before that counts as stuck. A step may take twice as long.
        log_format: see `logs.configure`.
        program: see `RankProcess`.

    Raises:
        ArgumentError, ModelError: what loading raised, in the first rank where it did.
        EngineDeadError: a rank died while it loaded.
        OSError: the system has no process or memory left.
    """

    plan: KVCachePlan
    on_cpu: bool

    def __init__(
        self,
        args: EngineArgs,
        checkpoint: Checkpoint,
        on_progress: Callable[[], None] = lambda: None,
        *,
        timeout_s: float = 300.0,
        log_format: str = "text",
        program: Sequence[str] = PROGRAM,
    ) -> None:
        layout = Layout.of(args)
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # held by whoever reads from ranks, or ends them
        self._error: StokerError | None = None
        self._num_launched = 0
        self._is_closing = False
        self._ranks: list[RankProcess] = []
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            undo.callback(self._end, EngineDeadError("its ranks were not loaded"))
            rendezvous = os.memfd_create("stoker-ranks")
            with os.fdopen(rendezvous):
                for rank in range(layout.size):
                    setup = Setup(rank, layout, f"file:///proc/self/fd/{rendezvous}", timeout_s)
                    self._ranks.append(RankProcess(setup, [rendezvous], log_format, program))
            self._answering = self._ranks[layout.first_of_last_stage]
            self._results = select.poll()
            self._results.register(self._answering.connection.fileno(), select.POLLIN)
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            self._send(replace(args, model=str(checkpoint.path), revision=None))
            self.plan, self.on_cpu = self._loaded(on_progress)
            undo.pop_all()

    def launch(self, step: Step) -> None:
        """See `Executor`.

        Raises:
            EngineDeadError: a rank has ended, or does not read.
        """
        self._send(step)
        self._num_launched += 1

    def collect(self) -> StepResult:
        """See `Executor`.

        Raises:
            EngineDeadError: what ended a rank, and with it all.
        """
        self._wait_for(lambda: self._results.poll(_LOOK_S * 1000), lambda: f"{self._answering.name} gave no result")
        result = self._receive(self._answering)
        assert isinstance(result, StepResult), result
        self._num_launched -= 1
        return result

    def abandon(self) -> None:
        """See `Executor`."""
        with suppress(EngineDeadError):  # which the next call raises again
            while self._num_launched:
                self.collect()

    def set_token_table(self, table: TokenTable) -> None:
        """See `Executor`."""
        self._send(table)

    def prepare(self, grammar: Grammar) -> Future[object]:
        """See `Executor`. Nothing is made ready here: the rank that samples compiles a grammar in the first step that
        needs it, and all sequences wait for that step."""
        ready: Future[object] = Future()
        ready.set_result(None)
        return ready

    def shutdown(self) -> None:
        """See `Executor`."""
        with self._lock:
            self._is_closing = True
            self._error = self._error or EngineDeadError("its ranks were shut down")
        for rank in self._ranks:
            rank.finish()
        deadline = time.monotonic() + _CLOSE_S
        for rank in self._ranks:
            rank.wait(deadline - time.monotonic())
            rank.kill()
            rank.close()

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if self._error is not None:
            raise self._error
        for rank in self._ranks:
            try:
                rank.send(data)
            except BlockingIOError:
                raise self._end(EngineStuckError(f"{rank.name} did not read for {self._timeout_s:.0f} s")) from None
            except OSError:
                raise self._end() from None
            except BaseException:  # Ctrl-C: some ranks have the message, or half of it
                self._end(EngineDeadError("its ranks were interrupted"))
                raise

    def _receive(self, rank: RankProcess) -> Any:
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                message = rank.receive()
            except BlockingIOError:
                raise self._end(EngineStuckError(f"{rank.name} stopped in the middle of a message")) from None
            except (EOFError, OSError):
                raise self._end() from None
            except Exception as error:
                what = f"{rank.name} sent what cannot be read: {type(error).__name__}: {error}"
                raise self._end(EngineDeadError(what)) from error
            except BaseException:
                self._end(EngineDeadError("its ranks were interrupted"))
                raise
            if message is None:
                raise self._end()
            return message

    def _loaded(self, on_progress: Callable[[], None]) -> tuple[KVCachePlan, bool]:
        """Waits until all ranks have loaded."""
        loading = {rank.connection: rank for rank in self._ranks}
        found: list[Loaded] = []
        while loading:
            ready = self._wait_for(
                lambda: wait(loading, _LOOK_S), lambda: f"{_names(loading.values())} did not get on with loading"
            )
            for connection in ready:
                assert isinstance(connection, Connection)
                message = self._receive(loading[connection])
                if isinstance(message, Loaded):
                    del loading[connection]
                    found.append(message)
                else:
                    assert isinstance(message, Progress), message
                on_progress()
        if any(each != found[0] for each in found):
            raise self._end(EngineDeadError(f"its ranks disagree: {found}"))
        return found[0].plan, found[0].on_cpu

    def _wait_for(self, come: Callable[[], list[T]], otherwise: Callable[[], str]) -> list[T]:
        """What `come` returns, as soon as that is not empty; where it is, it takes `_LOOK_S`. Time in which this
        process itself did not run counts against nobody.

        Raises:
            EngineStuckError: a rank is stopped; or `otherwise`, too late.
        """
        waited, stopped_for = 0.0, dict.fromkeys(self._ranks, 0.0)
        while True:
            began = time.monotonic()
            if found := come():
                return found
            passed = min(time.monotonic() - began, 2 * _LOOK_S)
            for rank in self._ranks:
                stopped_for[rank] = stopped_for[rank] + passed if rank.is_stopped else 0.0
                if stopped_for[rank] >= _STOPPED_S:
                    raise self._end(_stopped([rank]))
            waited += passed
            if waited >= 2 * self._timeout_s:  # had it waited for others, it would have said so by now
                raise self._end(EngineStuckError(f"{otherwise()} for {waited:.0f} s"))

    def _watch(self) -> None:
        """Ends all ranks when one has ended."""
        wait_for_hangup(*(rank.connection.fileno() for rank in self._ranks))
        with self._lock:
            if not self._is_closing:
                logger.error("the ranks ended: %s", self._end())

    def _end(self, because: StokerError | None = None) -> StokerError:
        """Ends all ranks.

        Returns:
            What to raise: `because`, or what ended the first of them.
        """
        with self._lock:
            if self._error is None:
                if because is None:
                    deadline = time.monotonic() + _GRACE_S
                    for rank in self._ranks:
                        rank.wait(deadline - time.monotonic())
                for rank in self._ranks:
                    rank.kill()
                self._error = because or self._cause()
            return self._error

    def _cause(self) -> StokerError:
        """Which rank was the first to end, and why: one that did not end for want of another. If there is none, those
        that had to be killed are what the others waited for."""
        for rank in self._ranks:
            if (cause := rank.cause()) is not None:
                return cause
        silent = [rank for rank in self._ranks if rank.was_killed]
        if stopped := [rank for rank in silent if rank.was_stopped]:
            return _stopped(stopped)
        if silent:
            return EngineStuckError(
                f"{_names(silent)} did not come to an operation of all ranks within {self._timeout_s:.0f} s"
            )
        return EngineDeadError("; ".join(rank.lost.message for rank in self._ranks if rank.lost is not None))


def _stopped(ranks: Iterable[RankProcess]) -> EngineStuckError:
    return EngineStuckError(f"{_names(ranks)} was stopped (SIGSTOP or a debugger), and killed")


def _names(ranks: Iterable[RankProcess]) -> str:
    return ", ".join(rank.name for rank in ranks)
