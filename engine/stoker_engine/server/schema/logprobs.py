"""Logprobs in the shapes of OpenAI's two endpoints, and in vLLM's for prompts.

A position's candidates come with the token that stands there first, then the likeliest ones. Minus infinity, which
JSON cannot say, is written as -9999, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from stoker_engine.core.logprobs import Logprob, PositionLogprobs
from stoker_engine.server.engine.engine_client import TokenTexts

_LOWEST = -9999.0
_REPLACEMENT = "\ufffd"


class CompletionLogprobs(BaseModel):
    """Of /v1/completions: four lists, an entry a token. `text_offset` counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TokenLogprob(BaseModel):
    """One candidate, in /v1/chat/completions."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """One token of the answer and its likeliest alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Of /v1/chat/completions."""

    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """One candidate for a position of the prompt, in vLLM's shape."""

    logprob: float
    rank: int | None
    decoded_token: str | None


#: For each position of a prompt, its candidates by token id; null for the first, which nothing precedes.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


@dataclass(frozen=True)
class LogprobWriter:
    """Writes logprobs as one request wants them.

    Attributes:
        top: likeliest candidates returned at each position; -1: all.
        as_token_ids: write a token as ``token_id:N`` instead of its text.
    """

    tokenizer: TokenTexts
    top: int
    as_token_ids: bool

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], offset: int
    ) -> tuple[CompletionLogprobs, int]:
        """The logprobs of a completion's tokens, the first of which begins at character `offset` of its text.

        Returns:
            (the logprobs, the offset at which the next token begins).
        """
        written = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, candidates in zip(token_ids, positions, strict=True):
            written.text_offset.append(offset)
            written.tokens.append(self._key(token_id))
            written.token_logprobs.append(None if candidates is None else _finite(candidates[token_id]))
            written.top_logprobs.append(None if candidates is None else self._top_by_token(candidates))
            offset += len(self.tokenizer.token_text(token_id))
        return written, offset

    def chat(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
        """The logprobs of a message's tokens."""
        return ChatLogprobs(
            content=[
                ContentLogprob(
                    **dict(self._token_logprob(token_id, candidates[token_id])),
                    top_logprobs=[self._token_logprob(*item) for item in self._top(candidates)],
                )
                for token_id, candidates in zip(token_ids, positions, strict=True)
            ]
        )

    def _top(self, candidates: PositionLogprobs) -> list[tuple[int, Logprob]]:
        """The likeliest, best first. The token that stands there is among them only if it is that likely."""
        best_first = sorted(candidates.items(), key=lambda item: -item[1].logprob)
        return best_first if self.top == -1 else best_first[: self.top]

    def _top_by_token(self, candidates: PositionLogprobs) -> dict[str, float]:
        """The token that stands there, and the likeliest."""
        by_token: dict[str, float] = {}
        for token_id, logprob in [*list(candidates.items())[:1], *self._top(candidates)]:
            by_token[self._key(token_id)] = _finite(logprob)
        return by_token

    def _token_logprob(self, token_id: int, logprob: Logprob) -> TokenLogprob:
        return TokenLogprob(
            token=self._token(token_id), logprob=_finite(logprob), bytes=list(self.tokenizer.token_bytes(token_id))
        )

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else self.tokenizer.token_text(token_id)

    def _key(self, token_id: int) -> str:
        """A token's text, if no other token looks like it: parts of characters all look alike.

        Those are written as OpenAI does, ``bytes:\\xe2\\x80``; what has no text at all, by its id.
        """
        token = self._token(token_id)
        if token and _REPLACEMENT not in token:
            return token
        raw = self.tokenizer.token_bytes(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if raw else f"token_id:{token_id}"


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """A prompt's logprobs in vLLM's shape."""
    return [None if candidates is None else _prompt_position(candidates) for candidates in positions]


def _prompt_position(candidates: PositionLogprobs) -> dict[int, PromptLogprob]:
    return {
        token_id: PromptLogprob(logprob=_finite(entry), rank=entry.rank, decoded_token=entry.decoded_token)
        for token_id, entry in candidates.items()
    }


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)
