"""Log-probabilities, with token ids or with the tokens' text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position.

    Attributes:
        token_ids: the chosen token, then the most likely ones, best first; these may include the chosen one.
        logprobs: log-probability of each.
        rank: rank of the chosen token; 1 is the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True)
class Logprob:
    """A candidate token at one position.

    Attributes:
        logprob: natural log-probability of the token.
        rank: rank by probability; 1 is the most likely. None: unknown.
        decoded_token: text of the token.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: Candidates at one position by token id: the chosen token, then the most likely ones, best first.
PositionLogprobs = dict[int, Logprob]
