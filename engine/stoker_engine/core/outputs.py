"""What the engine reports of its requests: tokens first (`TokenDelta`), and with their text (`OutputDelta`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import PositionLogprobs, TokenLogprobs
from stoker_engine.core.step_report import StepReport


@dataclass(slots=True)
class TokenDelta:
    """What a step added to one sequence of a request.

    Attributes:
        index: which of the request's sequences.
        token_ids: the new tokens.
        logprobs: one for each of `token_ids`, when asked for.
        prompt_logprobs: one for each prompt token but the first; with a sequence's first delta, when asked for.
        cumulative_logprob: of a finished beam.
        finish_reason: set on the last delta of a sequence.
        stop_reason: the stop token that ended it.
        error: with `FinishReason.ERROR`, a sentence on what went wrong.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    def __reduce__(self) -> tuple[type[TokenDelta], tuple[object, ...]]:
        """Pickled as a call: twice as fast as the dictionary that slots are pickled as, hundreds of times a step."""
        return TokenDelta, (
            self.request_id,
            self.index,
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            self.logprobs,
            self.prompt_logprobs,
            self.cumulative_logprob,
            self.num_cached_tokens,
            self.error,
        )


@dataclass(frozen=True)
class StepOutputs:
    """All that one step reports."""

    deltas: list[TokenDelta]
    report: StepReport | None


@dataclass(frozen=True)
class OutputDelta:
    """What was added to one sequence of a request, as it goes to a stream.

    Attributes:
        text: text that can no longer change; empty while a character or a possible stop string is incomplete.
        token_ids: the tokens behind it. Their text may come with a later delta.
        logprobs: one for each of `token_ids`, when asked for.
        prompt_logprobs: for each prompt token; None for the first, which nothing precedes.
        finish_reason: set on the last delta of a sequence.
        error: with `FinishReason.ERROR`, a sentence on what went wrong.
    """

    request_id: str
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    index: int = 0
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None


@dataclass
class CompletionOutput:
    """One generated sequence: so far, or whole when `finish_reason` is set."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """A request's result from ``LLM.generate``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None


@dataclass
class BeamSearchSequence:
    """One beam. `tokens` hold the prompt too, as vLLM has it."""

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]
