"""Runs steps in several rank processes, each of which computes its part of the model.

    Engine ─► RankExecutor ──── steps ──┬─► rank 0: Runner ──► results ─► Engine
                                        │      ↕ sums, tokens (`parallel`)
                                        └─► rank 1: Runner

Every rank gets every step from the scheduler, and computes it with its part of the weights. One rank, the first of the
last stage, samples and sends results. On a CPU a rank runs a step as soon as it receives the step. On accelerators it
only launches the step, and waits for the result when it receives a `Collect`, which may follow the next launch; all
ranks do both in the same order.

If one rank ends, all ranks are ended. A thread monitors them, even while no step runs: when a rank has ended, or was
stopped for `_STOPPED_S`, all ranks are killed. The first cause, determined from all last messages and exit codes, is
raised by later calls and reported to the supervisor.

A hanging rank is detected by a process that waits for it. The timeouts are staggered, so that the process with the most
specific information reports first: other ranks know which rank they wait for, this executor knows which rank did not
answer, and the server, which waits for `--step-timeout`, knows neither:

    0 ────────── other ranks ── this executor ── --step-timeout
                     0.6 ×           0.8 ×
"""

from __future__ import annotations

import itertools
import logging
import pickle
import queue
import select
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Final

from stoker_common.errors import (
    ArgumentError,
    EngineDeadError,
    EngineStuckError,
    ModelError,
    StokerError,
)
from stoker_common.subprocesses.lifeline import wait_for_last_words
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.adapter_load import AdapterLoad
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.step import Step, StepResult
from stoker_engine.exec.rank import Rank
from stoker_engine.exec.rank_messages import (
    AdapterLoaded,
    AllLoaded,
    Collect,
    DropAdapter,
    LoadAdapter,
    Loaded,
    Prepare,
    Prepared,
    Progress,
)
from stoker_engine.exec.rank_process import PROGRAM
from stoker_engine.exec.start_ranks import start_ranks
from stoker_engine.exec.supervision import Supervision
from stoker_engine.grammar.matcher import GrammarError
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.models.loading.load_progress import OnProgress
from stoker_engine.nodes.head import Head
from stoker_engine.parallel.layout import RankLayout

if TYPE_CHECKING:
    from stoker_engine.exec.kv_cache import KVCachePlan
    from stoker_engine.models.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

#: Fractions of the step timeout after which a rank reports a missing rank, and this executor a rank without an answer.
_RANKS_WAIT: Final = 0.6
_EXECUTOR_WAITS: Final = 0.8

#: Minimum of the timeout for the start of the ranks' processes, in seconds: many processes load torch at once.
_START_S: Final = 60.0

#: Maximum seconds between two checks of the ranks, and until a stopped rank is killed.
_LOOK_S: Final = 1.0
_STOPPED_S: Final = 3.0

#: Maximum seconds for ranks to end after they lost another rank, to end on request, and to disappear after a kill. The
#: step timeout limits the first and the last, since a frozen node cannot kill its ranks.
_GRACE_S: Final = 1.0
_CLOSE_S: Final = 5.0
_KILL_S: Final = 5.0

#: Verb phrase of the error if ranks have read different files of an adapter; see `AdapterLoad`.
_DIFFERENT_FILES: Final = "differ between nodes; each node needs the same files"


class RankExecutor:
    """See `exec.executor.Executor`. The constructor returns once all ranks have loaded.

    Args:
        args: the engine's arguments, which determine the number of ranks and how these split the model.
        checkpoint: the model; every rank reads its part of the files.
        on_progress: called regularly while ranks load, with the loaded and total bytes of all; see `OnProgress`.
        head: the engine's head; None: all ranks are processes of this node.
        program: see `RankProcess`.

    Raises:
        ArgumentError, ModelError: the loading error of the first rank that failed.
        EngineDeadError: a rank died during loading, or made no progress.
        OSError: the system has no processes or memory left.
    """

    plan: KVCachePlan
    on_cpu: bool
    runs_ahead: bool

    def __init__(
        self,
        args: EngineArgs,
        checkpoint: Checkpoint,
        on_progress: OnProgress = lambda done, total: None,
        supervision: Supervision | None = None,
        *,
        head: Head | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        layout = RankLayout.of(args)
        supervision = supervision or Supervision()
        self._head, self._on_death, self._on_missing_ranks = head, supervision.on_death, supervision.on_missing_ranks
        self._ranks_wait_s = _RANKS_WAIT * supervision.step_timeout
        self._patience_s = _EXECUTOR_WAITS * supervision.step_timeout
        self._stopped_s = min(_STOPPED_S, self._ranks_wait_s)
        self._lock = threading.RLock()  # held while ranks are ended
        self._sending = threading.Lock()
        self._error: StokerError | None = None
        self._num_launched = 0
        self._is_collecting = False  # whether a `Collect` was sent whose result is not received yet
        self._is_closing = False
        self._ranks: list[Rank] = []
        self._results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()
        self._pending_grammars: dict[int, Future[object]] = {}
        self._grammar_ids = itertools.count()
        self._adapter_loads: dict[int, AdapterLoad] = {}
        with ExitStack() as undo:
            undo.callback(self._close)
            undo.callback(self._end, EngineDeadError("its ranks were not loaded"))
            undo.push(self._dismiss_nodes)
            starting = start_ranks(
                args, self._ranks, self._ranks_wait_s, supervision, head, program, lambda: on_progress(0, 0)
            )
            with starting:
                self._answering = self._ranks[layout.first_of_last_stage]
                threading.Thread(target=self._watch_ranks, name="ranks", daemon=True).start()
                self._wait_started(on_progress)
                for rank in self._ranks:
                    self._send(replace(args, model=rank.model or str(checkpoint.path), revision=None), [rank])
                self.plan, self.on_cpu = self._loaded(on_progress)
                self.runs_ahead = not self.on_cpu
            self._send(AllLoaded())
            threading.Thread(target=self._read, name="from-ranks", daemon=True).start()
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
            EngineDeadError: a rank has ended, or gave no result in time.
        """
        if self.runs_ahead and not self._is_collecting:  # on a CPU the result is sent without a request
            self._is_collecting = True  # before the message, which must not be sent twice after an interrupt
            self._send(Collect())
        waited = 0.0
        while True:
            if self._error is not None:
                raise self._error
            began = time.monotonic()
            try:
                result = self._results.get(timeout=_LOOK_S)
            except queue.Empty:
                waited += _ran(began)
                if waited >= self._patience_s:
                    problem = f"{self._answering.name} gave no result for {waited:.0f} s"
                    raise self._end(EngineStuckError(problem)) from None
                continue
            if result is None:
                raise self._end()
            self._num_launched -= 1
            self._is_collecting = False
            return result

    def discard_in_flight(self) -> None:
        """See `Executor`."""
        with suppress(EngineDeadError):  # the next call raises it again
            while self._num_launched:
                self.collect()

    def set_token_table(self, table: TokenTable) -> None:
        """See `Executor`. Only the answering rank computes masks."""
        self._send(table, [self._answering])

    def prepare(self, grammar: Grammar) -> Future[object]:
        """See `Executor`. The future's result is None: the rank keeps the compiled grammar and finds it by its source.
        If ranks end, the future raises the reason."""
        grammar_id, ready = next(self._grammar_ids), Future[object]()
        self._pending_grammars[grammar_id] = ready
        self._send(Prepare(grammar_id, grammar), [self._answering])
        return ready

    def load_adapter(self, source: AdapterSource) -> Future[LoadedAdapter]:
        """See `Executor`. If ranks end, the future raises the reason."""
        names = [rank.name for rank in self._ranks]
        load = self._adapter_loads[source.number] = AdapterLoad(source, names, _DIFFERENT_FILES)
        self._send(LoadAdapter(source))
        return load.ready

    def drop_adapter(self, number: int) -> None:
        """See `Executor`."""
        self._send(DropAdapter(number))

    def shutdown(self) -> None:
        """See `Executor`."""
        if self._head is not None:
            self._head.dismiss()
        self._close()

    def _dismiss_nodes(self, _: object, error: BaseException | None, __: object) -> None:
        """Dismiss the other nodes if another attempt would fail in the same way, or (Ctrl-C) if no attempt follows."""
        if self._head is not None and isinstance(error, ArgumentError | ModelError):
            self._head.dismiss(str(error))
        elif self._head is not None and not isinstance(error, Exception):
            self._head.dismiss()

    def _close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._error = self._error or EngineDeadError("its ranks were shut down")
        for rank in self._ranks:
            rank.finish()
        _wait_all(self._ranks, _CLOSE_S)
        self._kill()
        for rank in self._ranks:
            rank.close()
        if self._head is not None:
            self._head.close()
        self._fail_preparing(self._error)

    def _send(self, message: Any, to: Sequence[Rank] | None = None) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if self._error is not None:
            raise self._error
        with self._sending:
            for rank in self._ranks if to is None else to:
                self._send_to(rank, data)

    def _send_to(self, rank: Rank, data: bytes) -> None:
        try:
            rank.send(data)
        except BlockingIOError:
            raise self._end(EngineStuckError(f"{rank.name} did not read for {self._ranks_wait_s:.0f} s")) from None
        except OSError:
            raise self._end() from None
        except BaseException:  # Ctrl-C: only some ranks have received the whole message
            self._end(EngineDeadError("its ranks were interrupted"))
            raise

    def _receive(self, rank: Rank) -> Any:
        if self._error is not None:
            raise self._error
        try:
            message = rank.receive()
        except BlockingIOError:
            raise self._end(EngineStuckError(f"{rank.name} stopped in the middle of a message")) from None
        except (EOFError, OSError):
            raise self._end() from None
        except Exception as error:
            problem = f"{rank.name} sent an unreadable message: {type(error).__name__}: {error}"
            raise self._end(EngineDeadError(problem)) from error
        except BaseException:
            self._end(EngineDeadError("its ranks were interrupted"))
            raise
        if message is None:
            raise self._end()
        return message

    def _wait_started(self, on_progress: OnProgress) -> None:
        """Wait until all ranks have started, so that no rank has to wait for a late one."""
        starting = {rank.connection: rank for rank in self._ranks}
        waited = 0.0
        while starting:
            began = time.monotonic()
            for connection in wait(starting, _LOOK_S):
                assert isinstance(connection, Connection)
                message = self._receive(starting.pop(connection))
                assert isinstance(message, Progress), message
            waited += _ran(began)
            on_progress(0, 0)
            if starting and waited >= max(self._patience_s, _START_S):
                problem = f"{_names(starting.values())} did not start within {waited:.0f} s"
                raise self._end(EngineStuckError(problem))

    def _loaded(self, on_progress: OnProgress) -> tuple[KVCachePlan, bool]:
        """Wait until all ranks have loaded. Each must send progress within `_patience_s`; a rank that waits for another
        rank reports that earlier by itself."""
        loading = {rank.connection: rank for rank in self._ranks}
        silent_for = dict.fromkeys(self._ranks, 0.0)
        weights = dict.fromkeys(self._ranks, Progress(0, 0))
        found: list[Loaded] = []
        while loading:
            began = time.monotonic()
            ready = wait(loading, _LOOK_S)
            passed = _ran(began)
            for rank in loading.values():
                silent_for[rank] += passed
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = loading[connection]
                message = self._receive(rank)
                silent_for[rank] = 0.0
                if isinstance(message, Loaded):
                    del loading[connection]
                    self._on_missing_ranks(
                        [rank_index for rank_index, each in enumerate(self._ranks) if each in loading.values()]
                    )
                    found.append(message)
                else:
                    assert isinstance(message, Progress), message
                    weights[rank] = message
                on_progress(sum(each.done for each in weights.values()), _total(weights.values()))
            if silent := [rank for rank in loading.values() if silent_for[rank] >= self._patience_s]:
                seconds = max(silent_for[rank] for rank in silent)
                problem = f"{_names(silent)} made no progress in loading for {seconds:.0f} s"
                raise self._end(EngineStuckError(problem))
        if any(each != found[0] for each in found):
            raise self._end(EngineDeadError(f"its ranks disagree: {found}"))
        return found[0].plan, found[0].on_cpu

    def _read(self) -> None:
        """Process messages until a rank ends: results and grammars from the answering rank, adapters from all."""
        poll = select.poll()
        ranks = {rank.connection.fileno(): rank for rank in self._ranks}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                for descriptor, _ in poll.poll():
                    self._take(ranks[descriptor])
        except StokerError:
            logger.debug("no more results from the ranks")  # callers that wait for one raise the error
        finally:
            self._results.put(None)

    def _take(self, rank: Rank) -> None:
        message = self._receive(rank)
        if isinstance(message, Prepared):
            self._resolve_prepared(message)
        elif isinstance(message, AdapterLoaded):
            self._resolve_adapter(rank, message)
        else:
            assert isinstance(message, StepResult), message
            self._results.put(message)

    def _resolve_prepared(self, prepared: Prepared) -> None:
        ready = self._pending_grammars.pop(prepared.number, None)
        if ready is not None and ready.set_running_or_notify_cancel():
            if prepared.error is None:
                ready.set_result(None)
            else:
                ready.set_exception(GrammarError(prepared.error))

    def _resolve_adapter(self, rank: Rank, answer: AdapterLoaded) -> None:
        """Record a rank's answer to a load. Once all have answered, either all keep the adapter or none does."""
        load = self._adapter_loads.get(answer.number)
        if load is None:
            return  # all ranks are being ended
        if not load.answer(rank.name, answer.loaded, answer.error):
            return
        error = load.error()
        if error is not None:
            self._send(DropAdapter(answer.number), [each for each in self._ranks if load.has_loaded(each.name)])
        if self._adapter_loads.pop(answer.number, None) is not None:
            load.end(error)

    def _fail_preparing(self, error: StokerError | None) -> None:
        while self._adapter_loads:
            with suppress(KeyError):  # ended meanwhile
                _, load = self._adapter_loads.popitem()
                load.end(error)
        while self._pending_grammars:
            with suppress(KeyError):  # resolved meanwhile
                _, ready = self._pending_grammars.popitem()
                if ready.set_running_or_notify_cancel():
                    ready.set_exception(error)

    def _watch_ranks(self) -> None:
        """End all ranks when one has ended, or is stopped for too long. Time in which this process itself did not run
        is not counted."""
        sockets = [rank.connection.fileno() for rank in self._ranks]
        stopped_for = dict.fromkeys(self._ranks, 0.0)
        began = time.monotonic()
        while not wait_for_last_words(*sockets, timeout_s=_LOOK_S):
            if self._is_closing:
                return
            passed, began = _ran(began), time.monotonic()
            for rank in self._ranks:
                stopped_for[rank] = stopped_for[rank] + passed if rank.is_stopped else 0.0
            if stopped := [rank for rank, seconds in stopped_for.items() if seconds >= self._stopped_s]:
                self._end(_stopped(stopped))
        error = self._end()
        if not self._is_closing:
            self._on_death(error)

    def _end(self, because: StokerError | None = None) -> StokerError:
        """End all ranks, unless they have been ended.

        Returns:
            The error to raise: the first call's `because` or, without it, the reason why the first rank ended.
        """
        with self._lock:
            if self._error is None:
                if because is None:
                    _wait_all(self._ranks, min(_GRACE_S, self._ranks_wait_s / 3))
                self._kill()
                self._error = because or self._cause()
                self._fail_preparing(self._error)
            return self._error

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in _wait_all(self._ranks, min(_KILL_S, self._ranks_wait_s / 6)):
            logger.error("%s could not be killed and is abandoned", rank)

    def _cause(self) -> StokerError:
        """Return why the first rank ended: the cause of a rank that did not end because of another one. If there is no
        such rank, the other ranks ended because they waited for ranks that then had to be killed."""
        for rank in self._ranks:
            if (cause := rank.cause()) is not None:
                return cause
        silent = [rank for rank in self._ranks if rank.was_killed and rank.lost is None]
        if stopped := [rank for rank in silent if rank.was_stopped]:
            return _stopped(stopped)
        if silent:
            return EngineStuckError(
                f"{_names(silent)} did not join an operation of all ranks within {self._ranks_wait_s:.0f} s"
            )
        return EngineDeadError("; ".join(rank.lost.message for rank in self._ranks if rank.lost is not None))


def _ran(since: float) -> float:
    """Return the seconds since `since`, at most 2 × `_LOOK_S`: in the rest this process did not run."""
    return min(time.monotonic() - since, 2 * _LOOK_S)


def _wait_all(ranks: Iterable[Rank], timeout_s: float) -> list[Rank]:
    """Wait for the ranks to end, and return those that have not ended within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return [rank for rank in ranks if not rank.wait(deadline - time.monotonic())]


def _total(weights: Iterable[Progress]) -> int:
    """Return the weights of all ranks in bytes; 0: not known for all ranks yet."""
    totals = [each.total for each in weights]
    return sum(totals) if all(totals) else 0


def _stopped(ranks: Iterable[Rank]) -> EngineStuckError:
    return EngineStuckError(f"{_names(ranks)} was stopped (SIGSTOP or a debugger), and killed")


def _names(ranks: Iterable[Rank]) -> str:
    return ", ".join(rank.name for rank in ranks)
