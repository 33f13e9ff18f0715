"""Logprobs of an answer's tokens, in the format that OpenAI's chat and responses APIs share.

The candidates of a position are the sampled or given token first, then the likeliest ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from stoker_engine.core.logprobs import Logprob, PositionLogprobs
from stoker_engine.server.engine.engine_client import TokenTexts

_LOWEST = -9999.0


class TokenLogprob(BaseModel):
    """One candidate for a position."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """One token of the answer, and the likeliest candidates for its position."""

    top_logprobs: list[TokenLogprob]


@dataclass(frozen=True)
class LogprobWriter:
    """Writes logprobs in the form that one request asks for.

    Attributes:
        top: number of likeliest candidates per position; -1 for all.
        as_token_ids: whether a token is written as ``token_id:N`` instead of its text.
    """

    tokenizer: TokenTexts
    top: int
    as_token_ids: bool

    def content(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> list[ContentLogprob]:
        """Return the logprobs of a message's tokens."""
        return [
            ContentLogprob(
                **dict(self._token_logprob(token_id, candidates[token_id])),
                top_logprobs=[self._token_logprob(*item) for item in self.likeliest(candidates)],
            )
            for token_id, candidates in zip(token_ids, positions, strict=True)
        ]

    def likeliest(self, candidates: PositionLogprobs) -> list[tuple[int, Logprob]]:
        """Return the `top` likeliest candidates, best first. The actual token may be missing."""
        best_first = sorted(candidates.items(), key=lambda item: -item[1].logprob)
        return best_first if self.top == -1 else best_first[: self.top]

    def token(self, token_id: int) -> str:
        """Return a token in the form that the request asks for."""
        return f"token_id:{token_id}" if self.as_token_ids else self.tokenizer.token_text(token_id)

    def _token_logprob(self, token_id: int, logprob: Logprob) -> TokenLogprob:
        return TokenLogprob(
            token=self.token(token_id), logprob=finite(logprob), bytes=list(self.tokenizer.token_bytes(token_id))
        )


def finite(entry: Logprob) -> float:
    """Return a logprob as a JSON number: -9999 for minus infinity, as in vLLM."""
    return max(entry.logprob, _LOWEST)
