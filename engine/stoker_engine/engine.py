"""The step loop: schedule, launch, collect, commit, report. It processes tokens; callers handle text.

    one step in flight     schedule 1 ─ launch 1 ─ collect 1 ─ commit 1 ─ schedule 2 ─ launch 2 ─ …
    two of them            … schedule 2 ─ launch 2 ─ collect 1 ─ commit 1 ─ schedule 3 ─ launch 3 ─ collect 2 …

With two (``--async-scheduling``, on GPUs the default without drafts), the host's work on one step overlaps with the
model's work on the next. A pipeline has at most as many steps in flight as stages, plus one with
``--async-scheduling``.

An engine is not thread-safe. `LLM` drives it offline, and the engine process drives it for the server.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from stoker_common.errors import AdapterError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource, LoadedAdapter
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.laps import Laps
from stoker_engine.core.outputs import StepOutputs, TokenDelta
from stoker_engine.core.proposer import Proposer
from stoker_engine.core.request_timelines import RequestTimelines
from stoker_engine.core.step_report import SchedulerStats, StepTimes
from stoker_engine.exec.adapters import LORA_IS_OFF
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.check_sharding import refuse_indivisible
from stoker_engine.exec.dtypes import stored_as
from stoker_engine.exec.executor import Executor, LocalExecutor
from stoker_engine.exec.loading_view import LoadingView
from stoker_engine.exec.rank_executor import RankExecutor
from stoker_engine.exec.supervision import Supervision
from stoker_engine.grammar.grammar_queue import GrammarQueue
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.models.checkpoint import Checkpoint, find_checkpoint
from stoker_engine.models.generation_config import sampling_defaults
from stoker_engine.nodes.head import Head
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.sched.adapter_loads import AdapterLoads
from stoker_engine.sched.commit import fail
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.scheduled import Scheduled
from stoker_engine.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)

#: Error of a request whose adapter is unknown, or was removed before the request arrived.
NO_SUCH_ADAPTER: Final = "the LoRA adapter of this request is not loaded; it may have been removed meanwhile"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight: the time of its launch on the monotonic clock, and the seconds spent on scheduling it."""

    scheduled: Scheduled
    at: float
    schedule_time: float


class Engine:
    """A loaded model and the requests it processes.

    Args:
        executor: runs the steps; None: this process runs them.
        proposer: proposes drafts to verify; None: no drafts.

    Attributes:
        info: properties of the engine that callers need to build requests.
    """

    def __init__(
        self,
        args: EngineArgs,
        checkpoint: Checkpoint,
        on_progress: Callable[[], None] = lambda: None,
        executor: Executor | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        laps = Laps()
        laps.end("checkpoint" if executor is None else "ranks")
        defaults = sampling_defaults(args.generation_config, checkpoint.path)
        self.executor = executor or LocalExecutor(
            build_runner(args, checkpoint, LoadingView(on_progress), lap=laps.end), bool(args.async_scheduling)
        )
        plan = self.executor.plan
        kv = KVManager(plan.num_blocks, plan.block_size, plan.groups, plan.step_tokens, args.enable_prefix_caching)
        stages = RankLayout.of(args).pipeline
        is_async = args.async_scheduling
        # A sequence with drafts waits for the step in flight, so other sequences would be batched without it.
        if is_async is None:
            is_async = self.executor.runs_ahead and proposer is None
        max_in_flight = stages + is_async
        self.scheduler = Scheduler(
            kv,
            plan.max_num_seqs,
            plan.step_tokens,
            args.scheduling_policy,
            args.enable_chunked_prefill,
            args.long_prefill_token_threshold,
            None if args.max_itl_ms is None else args.max_itl_ms / 1e3,
            proposer,
            num_batches=max_in_flight if stages > 1 else 1,
            max_loras=args.max_loras if args.enable_lora else 0,
            num_resident_adapters=args.num_resident_adapters,
        )
        stored = stored_as(args, checkpoint, "cpu" if self.executor.on_cpu else "cuda")
        self.info = EngineInfo(
            max_model_len=plan.max_model_len,
            vocab_size=checkpoint.config.vocab_size,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            cache_groups=plan.groups,
            step_tokens=plan.step_tokens,
            eos_token_ids=checkpoint.config.eos_token_ids,
            max_num_seqs=plan.max_num_seqs,
            sampling_defaults=defaults,
            max_logprobs=args.max_logprobs,
            seed=args.seed,
            licence=checkpoint.card.licence,
            model_card=checkpoint.card.title,
            dtype=stored.dtype,
            quantization=checkpoint.method or args.quantization or "",
            weights=stored.weights,
            kv_cache_dtype=stored.kv_cache_dtype,
            load_laps=tuple(laps.ended),
        )
        self._timelines = RequestTimelines()
        self._grammar_queue = GrammarQueue()
        self._adapter_loads: AdapterLoads | None = None  # None: LoRA is off
        if self.scheduler.adapters is not None:
            load, drop = self.executor.load_adapter, self.executor.drop_adapter
            self._adapter_loads = AdapterLoads(self.scheduler.adapters, load, drop)
        self._refused: list[TokenDelta] = []  # deltas of refused requests, not yet returned
        self._num_reported_waiting = 0
        self._max_in_flight = max_in_flight
        self._in_flight: deque[_Launched] = deque()
        self._collected = 0.0  # monotonic time at which the last result was collected

    @classmethod
    def from_args(
        cls,
        args: EngineArgs,
        on_progress: Callable[[], None] = lambda: None,
        supervision: Supervision | None = None,
        head: Head | None = None,
    ) -> Engine:
        """Find and load the model, which takes seconds to minutes, and show the progress.

        Args:
            on_progress: called whenever loading progresses.
            supervision: how ranks are supervised, if there are several.
            head: connections to other nodes; None: created if other nodes have ranks of this engine.

        Raises:
            ArgumentError: an argument is not supported on this machine.
            ModelError: the model cannot be found, read or served.
            EngineDeadError: a rank died.
        """
        return cls.of_checkpoint(args, find_checkpoint(args), on_progress, supervision, head)

    @classmethod
    def of_checkpoint(
        cls,
        args: EngineArgs,
        checkpoint: Checkpoint,
        on_progress: Callable[[], None] = lambda: None,
        supervision: Supervision | None = None,
        head: Head | None = None,
    ) -> Engine:
        """Load a checkpoint that has been found; see `from_args`."""
        refuse_indivisible(args, checkpoint)
        head = head or Head.of(args, checkpoint.path)
        if head is None and RankLayout.of(args).size == 1:
            return cls(args, checkpoint, on_progress)
        executor = RankExecutor(args, checkpoint, LoadingView(on_progress), supervision, head=head)
        return cls(args, checkpoint, executor=executor)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return (
            self.scheduler.has_work
            or self._timelines.has_news
            or self._grammar_queue.has_work
            or bool(self._refused)
            or (self._adapter_loads is not None and self._adapter_loads.has_work)
        )

    def set_token_table(self, table: TokenTable) -> None:
        """Set the vocabulary as bytes. Called before the first request with a grammar."""
        self.executor.set_token_table(table)

    def load_adapter(self, source: AdapterSource) -> Future[LoadedAdapter]:
        """Register a LoRA adapter and load it; calls of `step` complete the load. Its files must be unchanged whenever
        it is loaded again.

        Returns:
            Future of the loaded adapter. It raises `AdapterError` if the files cannot be loaded (the adapter is then
            unregistered), or if the adapter is removed before its load starts.

        Raises:
            AdapterError: LoRA is off.
        """
        if self._adapter_loads is None:
            raise AdapterError(LORA_IS_OFF)
        return self._adapter_loads.register(source)

    def remove_adapter(self, number: int) -> None:
        """Refuse new requests for an adapter, and free its memory once its current requests have ended. Unknown numbers
        are ignored."""
        if self.scheduler.adapters is not None:
            self.scheduler.adapters.remove(number)

    def add(self, request: EngineRequest) -> None:
        """Add a request that `tokens.input_processor` has validated. A request with a grammar is scheduled after
        its compilation. A request for an unknown or removed adapter ends with an error."""
        adapters = self.scheduler.adapters
        if adapters is not None and request.adapter != NO_ADAPTER and not adapters.takes(request.adapter):
            self._refused += [
                TokenDelta(request.id, index, [], FinishReason.ERROR, error=NO_SUCH_ADAPTER)
                for index in range(request.num_sequences)
            ]
        elif request.grammar is not None:
            self._grammar_queue.add(request, self.executor.prepare(request.grammar))
        else:
            self._timelines.arrived(self.scheduler.add(request))

    def abort(self, request_id: str) -> None:
        """Abort a request whose result is not needed any more; unknown ids are ignored."""
        self._grammar_queue.abort(request_id)
        self._refused = [delta for delta in self._refused if delta.request_id != request_id]
        request = self.scheduler.finish(request_id, FinishReason.ABORT)
        if request is not None:
            self._timelines.ended(request, time.monotonic())

    def stop(self, request_id: str, index: int) -> None:
        """End sequence `index` of a request at a stop string in its text; unknown sequences are ignored."""
        request = self.scheduler.stop(request_id, index)
        if request is not None:
            self._timelines.ended(request, time.monotonic())

    def step(self) -> StepOutputs:
        """Launch as many steps as possible, commit the oldest result, and return its outputs. Pending errors are
        returned first, without committing a result. If no step is in flight, briefly wait for adapters or grammars."""
        try:
            return self._step()
        except BaseException:
            self._discard_in_flight()
            raise

    def shutdown(self) -> None:
        """Shut down the executor. No further steps are possible."""
        self.executor.shutdown()

    def _step(self) -> StepOutputs:
        if self._refused:
            refused, self._refused = self._refused, []
            return StepOutputs(refused, None)
        if self._adapter_loads is not None and (failed := self._collect_adapters(self._adapter_loads)):
            report = self._timelines.report(0, 0, failed, self._stats(), StepTimes(), time.monotonic())
            return StepOutputs(failed, report)
        if len(self._grammar_queue):
            if not self.scheduler.has_work:
                self._grammar_queue.wait()
            prepared, failed = self._grammar_queue.pop_ready()
            for request in prepared:
                failed += self._add_prepared(request)
            if failed:
                return StepOutputs(failed, None)
            if not self.scheduler.has_work and not self._grammar_queue.has_news:
                return StepOutputs([], None)
        while len(self._in_flight) < self._max_in_flight and self._launch():
            pass
        if not self._in_flight:
            if self._adapter_loads is not None and self._adapter_loads.is_loading and not self._has_news:
                self._adapter_loads.wait()
                return StepOutputs([], None)
            report = self._timelines.report(0, 0, [], self._stats(), StepTimes(), time.monotonic())
            return StepOutputs([], report)
        launched = self._in_flight.popleft()
        scheduled, schedule_time = launched.scheduled, launched.schedule_time
        result = self.executor.collect()
        collected = time.monotonic()
        deltas = self.scheduler.commit(scheduled, result, collected - max(launched.at, self._collected))
        self._collected = collected
        now = time.monotonic()
        times = StepTimes(schedule_time, result.prepare_time, result.model_time, result.sample_time, now - collected)
        num_tokens, num_prompt_tokens = scheduled.step.num_tokens, scheduled.num_prompt_tokens
        report = self._timelines.report(num_tokens, num_prompt_tokens, deltas, self._stats(), times, now)
        return StepOutputs(deltas, report)

    @property
    def _has_news(self) -> bool:
        """Whether there is something to report although no step ran."""
        loads = self._adapter_loads
        return (
            self._timelines.has_news
            or self._grammar_queue.has_news
            or (loads is not None and loads.has_news)
            or len(self.scheduler.waiting) != self._num_reported_waiting
        )

    def _collect_adapters(self, loads: AdapterLoads) -> list[TokenDelta]:
        """Process the loads that have ended. Returns the final deltas of requests whose adapters failed to load."""
        if not loads.has_work:
            return []
        deltas: list[TokenDelta] = []
        for number, error in loads.collect(self._uses_adapter).items():
            for request in [each for each in self.scheduler.requests.values() if each.spec.adapter == number]:
                deltas += fail(self.scheduler, request, error)
        return deltas

    def _uses_adapter(self, number: int) -> bool:
        requests = self.scheduler.requests.values()
        return any(request.spec.adapter == number for request in requests) or self._grammar_queue.uses(number)

    def _add_prepared(self, request: EngineRequest) -> list[TokenDelta]:
        """Add a request with a compiled grammar to the scheduler. Returns its final deltas if that fails."""
        try:
            self._timelines.arrived(self.scheduler.add(request))
        except Exception:  # an internal error affects only this request, as in `processes.main._add`
            logger.exception("the engine cannot take request %s", request.id)
            self.scheduler.finish(request.id, FinishReason.ABORT)
            return [TokenDelta(request.id, i, [], FinishReason.ERROR) for i in range(request.num_sequences)]
        return []

    def _stats(self) -> SchedulerStats:
        """Return the scheduler's statistics, plus the requests that wait for grammars."""
        stats = self.scheduler.stats()
        self._num_reported_waiting = len(self.scheduler.waiting)
        return replace(stats, num_waiting=stats.num_waiting + self._grammar_queue.reported())

    def _launch(self) -> bool:
        """Launch a step. Returns False if none can be scheduled now."""
        started = time.monotonic()
        scheduled = self.scheduler.schedule()
        if self._adapter_loads is not None:
            self._adapter_loads.start()
        if scheduled is None:
            return False
        now = time.monotonic()
        self._timelines.scheduled(scheduled.admitted, now)
        self.executor.launch(scheduled.step)
        self._in_flight.append(_Launched(scheduled, now, now - started))
        return True

    def _discard_in_flight(self) -> None:
        """Discard the steps in flight after an error, or after Ctrl-C during a step."""
        self._in_flight.clear()
        try:
            self.executor.discard_in_flight()
        finally:  # also after a second Ctrl-C
            self.scheduler.discard_in_flight()
