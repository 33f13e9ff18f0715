"""Token counts of an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Token counts, of one choice or of all.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache; None if not reported.
        reasoning_tokens: generated tokens of the reasoning, including markers; None without a reasoning parser.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
