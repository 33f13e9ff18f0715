"""Log-probabilities: as numbers, and with their tokens' text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, as numbers; natural logarithm.

    Attributes:
        token_ids: the token that stands there, then the likeliest ones, best first (the token may be among them).
        logprobs: theirs.
        rank: of the token that stands there; 1 is the likeliest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True)
class Logprob:
    """One candidate for a position.

    Attributes:
        rank: 1 is the likeliest.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: The candidates for one position: the token that stands there first, then the likeliest ones, best first.
PositionLogprobs = dict[int, Logprob]
