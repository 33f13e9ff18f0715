"""Outputs of the engine: as tokens (`TokenDelta`), and with their text (`OutputDelta`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import PositionLogprobs, TokenLogprobs
from stoker_engine.core.step_report import StepReport


@dataclass(slots=True)
class TokenDelta:
    """New tokens of one sequence of a request, or its end.

    Attributes:
        index: index of the sequence in its request.
        token_ids: the new tokens; for a finished beam, all tokens of its output.
        logprobs: log-probabilities of each of `token_ids`, if requested.
        prompt_logprobs: log-probabilities of each prompt token but the first, if requested; set in the first delta of
            sequence 0 that has tokens.
        cumulative_logprob: summed log-probability of a finished beam.
        finish_reason: set in the last delta of a sequence.
        stop_reason: the one of `stop_token_ids` that ended the sequence; for a beam, also an end-of-sequence token.
        error: message for `FinishReason.ERROR`.
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
        """Pickle as a constructor call, which is twice as fast as the default for slots; a step pickles hundreds."""
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
    """Deltas and statistics of at most one step."""

    deltas: list[TokenDelta]
    report: StepReport | None


@dataclass(slots=True)
class OutputDelta:
    """Text and tokens added to one sequence of a request, or its end.

    Attributes:
        text: new text; incomplete characters and possible beginnings of stop strings are held back.
        token_ids: the new tokens. Their text may come in a later delta.
        logprobs: log-probabilities of each of `token_ids`, if requested.
        prompt_logprobs: like `TokenDelta.prompt_logprobs`, with None for the first token.
        finish_reason: set in the last delta of a sequence.
        error: message for `FinishReason.ERROR`.
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
    """One generated sequence; complete when `finish_reason` is set.

    Attributes:
        index: index of the sequence among those of its request.
        text: generated text, without the stop string unless it was requested.
        token_ids: generated tokens.
        finish_reason: why the sequence ended.
        stop_reason: the stop string, or the one of `stop_token_ids`, that ended the sequence; for a beam, also an
            end-of-sequence token.
        logprobs: log-probabilities at each position of the output, if requested.
        cumulative_logprob: summed log-probability of the output; None for a sampled sequence without `logprobs`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """A request's result from a method of `LLM`.

    Attributes:
        request_id: id in log lines.
        prompt: text of the prompt; None: it was not given as text.
        prompt_token_ids: tokens of the prompt.
        outputs: the generated sequences, as many as ``n``.
        finished: whether all sequences have ended.
        num_cached_tokens: number of prompt tokens whose keys and values were in the prefix cache.
        prompt_logprobs: log-probabilities at each position of the prompt, if requested; None for the first one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None


@dataclass
class BeamSearchSequence:
    """One beam. As in vLLM, `tokens` include the prompt.

    Attributes:
        tokens: tokens of the prompt and of the beam.
        cum_logprob: summed log-probability of the beam's own tokens.
        text: text of the prompt, if it was given as text, and of the beam.
        finish_reason: why the beam ended.
        stop_reason: the token that ended the beam; None if its maximum length did.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The beams of a prompt.

    Attributes:
        sequences: the beams, best first.
    """

    sequences: list[BeamSearchSequence]
