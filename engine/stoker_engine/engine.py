"""The step loop: schedule, run, commit, tell.

Everything a request goes through after tokenization happens here, in one thread. `LLM` drives it offline,
`AsyncLLM` from a thread behind the server.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import RequestError
from stoker_engine.core.observer import Observer, StepReport
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.request import FinishReason, Request
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.exec.runner import Runner
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.scheduler import Scheduler
from stoker_engine.tokens.detokenizer import IncrementalDetokenizer
from stoker_engine.tokens.stop import StopStrings
from stoker_engine.tokens.tokenizer import Tokenizer


@dataclass
class _Text:
    """The text side of one request."""

    detokenizer: IncrementalDetokenizer
    stop: StopStrings


@dataclass
class Engine:
    """A loaded model and the requests it works on.

    Attributes:
        max_model_len: longest sequence, prompt and output.
    """

    args: EngineArgs
    tokenizer: Tokenizer
    runner: Runner
    scheduler: Scheduler
    observer: Observer | None = None
    _seeds: random.Random = field(init=False)
    _texts: dict[str, _Text] = field(default_factory=dict)
    _aborted: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.args.seed)

    @classmethod
    def from_args(cls, args: EngineArgs, chat_template: str | None = None, observer: Observer | None = None) -> Engine:
        """Finds and loads the model; takes seconds to minutes, and shows its progress.

        Raises:
            ArgumentError: an argument cannot be met on this machine.
            ModelError: the model cannot be found, read or served.
        """
        checkpoint = find_checkpoint(args)
        tokenizer = Tokenizer.load(checkpoint.path, chat_template)
        runner = Runner(args, checkpoint)
        kv = KVManager(runner.num_blocks, args.block_size, args.enable_prefix_caching)
        scheduler = Scheduler(kv, args.max_num_seqs, args.max_num_batched_tokens)
        return cls(args, tokenizer, runner, scheduler, observer)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output."""
        return self.runner.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Request:
        """Checks a prompt and makes it a request; touches no other, so it may run in any thread.

        Raises:
            RequestError: the prompt is empty, too long, or holds a token that the model does not have.
        """
        length, limit, vocabulary = len(prompt_token_ids), self.max_model_len, self.runner.config.vocab_size
        if length == 0:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if not all(0 <= token < vocabulary for token in prompt_token_ids):
            raise RequestError(f"the prompt holds a token id outside 0 … {vocabulary - 1}", "prompt")
        if length >= limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens and the prompt has {length}; shorten it",
                "prompt",
                "context_length_exceeded",
            )
        max_tokens = params.max_tokens or limit - length
        if length + max_tokens > limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens; the prompt has {length} and "
                f"max_tokens asks for {max_tokens} more. Ask for at most {limit - length}",
                "max_tokens",
                "context_length_exceeded",
            )
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        eos = frozenset(self.runner.config.eos_token_ids)
        return Request(request_id, prompt_token_ids, params, max_tokens, seed, eos)

    def add(self, request: Request) -> None:
        """Takes in a request made by `request`."""
        detokenizer = IncrementalDetokenizer(self.tokenizer, request.prompt_token_ids)
        self._texts[request.id] = _Text(detokenizer, StopStrings(request.params.stop))
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request whose result nobody wants any more; unknown ids are ignored."""
        request = self.scheduler.finish(request_id, FinishReason.ABORT)
        if request is not None:
            del self._texts[request_id]
            self._aborted.append(request)

    def step(self) -> list[OutputDelta]:
        """Advances every scheduled request by one step; what that added is returned."""
        started = time.monotonic()
        batch = self.scheduler.schedule()
        for sequence in batch.sequences:
            request = self.scheduler.requests[sequence.request_id]
            request.scheduled_time = request.scheduled_time or started
        sampled = self.runner.run(batch)
        now = time.monotonic()
        prompt_tokens = sum(
            max(
                0,
                min(sequence.end, self.scheduler.requests[sequence.request_id].num_prompt_tokens) - sequence.start,
            )
            for sequence in batch.sequences
        )
        advanced = self.scheduler.commit(batch, sampled)
        deltas = [self._tell(request, now) for request in advanced]
        self._observe(batch.num_tokens, prompt_tokens, advanced, now - started)
        return deltas

    def settle(self) -> None:
        """Reports aborted requests when there is no step to report them with."""
        if self._aborted:
            self._observe(0, 0, [], 0.0)

    def _tell(self, request: Request, now: float) -> OutputDelta:
        """The newest token of `request` as text; ends the request at a stop string."""
        request.first_token_time = request.first_token_time or now
        request.previous_token_time, request.last_token_time = request.last_token_time, now
        token_id = request.token_ids[-1]
        text = self._texts[request.id]
        told, stop = "", None
        if request.finish_reason is not FinishReason.STOP:  # the token that stops is no part of the text
            told, stop = text.stop.add(text.detokenizer.add(token_id))
        if request.finish_reason is not None and stop is None:
            more, stop = text.stop.add(text.detokenizer.flush())
            told += more
        if stop is not None:
            self.scheduler.finish(request.id, FinishReason.STOP)
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop
        if request.finish_reason is not None:
            told += text.stop.flush()
            del self._texts[request.id]
        return OutputDelta(
            request_id=request.id,
            text=told,
            token_ids=[token_id],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached or 0,
        )

    def _observe(self, num_tokens: int, num_prompt_tokens: int, advanced: list[Request], duration: float) -> None:
        finished = self._aborted + [request for request in advanced if request.finish_reason is not None]
        self._aborted = []
        if self.observer is not None:
            report = StepReport(num_tokens, num_prompt_tokens, advanced, finished, duration)
            self.observer.on_step(report, self.scheduler.stats())
