"""How many tokens an answer took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Tokens, of one choice or over all.

    Attributes:
        cached_tokens: of the prompt's tokens, those that a prefix hit saved; None: not reported.
        reasoning_tokens: of the generated tokens, those before the answer; None: the model does not reason.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
