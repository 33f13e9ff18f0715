"""The step loop: schedule, run, commit, report. It works on tokens; text is its callers' business.

One thread at a time may use an engine: `LLM` drives it offline, the engine process behind the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.journal import Journal
from stoker_engine.core.outputs import StepOutputs
from stoker_engine.core.step_report import StepTimes
from stoker_engine.exec.runner import Runner
from stoker_engine.models.checkpoint import Checkpoint, find_checkpoint
from stoker_engine.models.generation_config import sampling_defaults
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.scheduler import Scheduler


class Engine:
    """A loaded model and the requests it works on.

    Attributes:
        info: facts that callers make requests by.
    """

    def __init__(
        self, args: EngineArgs, checkpoint: Checkpoint, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        defaults = sampling_defaults(args.generation_config, checkpoint.path)
        self.runner = Runner(args, checkpoint, on_progress)
        plan = self.runner.plan
        kv = KVManager(plan.num_blocks, plan.block_size, plan.groups, plan.step_tokens, args.enable_prefix_caching)
        self.scheduler = Scheduler(
            kv,
            args.max_num_seqs,
            args.max_num_batched_tokens,
            args.scheduling_policy,
            args.enable_chunked_prefill,
            args.prompt_tokens_beside_decodes(on_cpu=self.runner.device.type == "cpu"),
        )
        self.info = EngineInfo(
            max_model_len=plan.max_model_len,
            vocab_size=checkpoint.config.vocab_size,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            cache_groups=plan.groups,
            step_tokens=plan.step_tokens,
            eos_token_ids=checkpoint.config.eos_token_ids,
            max_num_seqs=args.max_num_seqs,
            sampling_defaults=defaults,
            max_logprobs=args.max_logprobs,
            seed=args.seed,
            licence=checkpoint.card.licence,
            model_card=checkpoint.card.title,
        )
        self._journal = Journal()

    @classmethod
    def from_args(cls, args: EngineArgs, on_progress: Callable[[], None] = lambda: None) -> Engine:
        """Finds and loads the model; takes seconds to minutes, and shows its progress.

        Args:
            on_progress: called whenever loading gets on.

        Raises:
            ArgumentError: an argument cannot be met on this machine.
            ModelError: the model cannot be found, read or served.
        """
        return cls(args, find_checkpoint(args), on_progress)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self.scheduler.has_work or self._journal.has_news

    def add(self, request: EngineRequest) -> None:
        """Takes in a request, checked by `tokens.input_processor`."""
        self._journal.arrived(self.scheduler.add(request))

    def abort(self, request_id: str) -> None:
        """Ends a request whose result nobody wants any more; unknown ids are ignored."""
        request = self.scheduler.finish(request_id, FinishReason.ABORT)
        if request is not None:
            self._journal.ended(request, time.monotonic())

    def stop(self, request_id: str, index: int) -> None:
        """Ends one sequence at a stop string that was found in its text; unknown ones are ignored."""
        request = self.scheduler.stop(request_id, index)
        if request is not None:
            self._journal.ended(request, time.monotonic())

    def step(self) -> StepOutputs:
        """Advances every scheduled sequence by one step; what that added is returned."""
        started = time.monotonic()
        batch = self.scheduler.schedule()
        if not batch.sequences:
            return StepOutputs([], self._journal.report(batch, [], self.scheduler.stats(), StepTimes(), started))
        self._journal.scheduled(batch, started)
        scheduled = time.monotonic()
        result = self.runner.run(batch)
        ran = time.monotonic()
        deltas = self.scheduler.commit(batch, result)
        now = time.monotonic()
        times = StepTimes(scheduled - started, result.prepare_time, result.model_time, result.sample_time, now - ran)
        return StepOutputs(deltas, self._journal.report(batch, deltas, self.scheduler.stats(), times, now))
