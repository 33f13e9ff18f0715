"""What callers get back, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_engine.core.request import FinishReason


@dataclass
class CompletionOutput:
    """One generated sequence: so far, or whole when `finish_reason` is set."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A request's result from ``LLM.generate``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class OutputDelta:
    """What one step added to a request, as it goes to a stream.

    Attributes:
        text: text that can no longer change; empty while a character or a possible stop string is incomplete.
        token_ids: the new tokens.
        finish_reason: set on the last delta of a request.
    """

    request_id: str
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
