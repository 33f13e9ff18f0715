"""Logprobs in the shapes of OpenAI's two endpoints, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from stoker_engine.core.logprobs import PositionLogprobs
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.fields.logprobs import ContentLogprob, LogprobWriter, finite

_REPLACEMENT = "\ufffd"


class CompletionLogprobs(BaseModel):
    """Of /v1/completions: four lists, an entry a token. `text_offset` counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


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


def logprob_writer(service: Service, top: int | None, as_token_ids: bool | None) -> LogprobWriter | None:
    """Writes logprobs as a body wants them, if it does.

    Args:
        top: how many of the likeliest at each position.
        as_token_ids: None: as the server's flag says.
    """
    if top is None:
        return None
    if as_token_ids is None:
        as_token_ids = service.args.frontend.return_tokens_as_token_ids
    return LogprobWriter(service.client.tokenizer.vocabulary, top, as_token_ids)


def completion_logprobs(
    writer: LogprobWriter, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], offset: int
) -> tuple[CompletionLogprobs, int]:
    """The logprobs of a completion's tokens, the first of which begins at character `offset` of its text.

    Returns:
        (the logprobs, the offset at which the next token begins).
    """
    written = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, candidates in zip(token_ids, positions, strict=True):
        written.text_offset.append(offset)
        written.tokens.append(_key(writer, token_id))
        written.token_logprobs.append(None if candidates is None else finite(candidates[token_id]))
        written.top_logprobs.append(None if candidates is None else _top_by_token(writer, candidates))
        offset += len(writer.tokenizer.token_text(token_id))
    return written, offset


def _top_by_token(writer: LogprobWriter, candidates: PositionLogprobs) -> dict[str, float]:
    """The token that stands there, and the likeliest."""
    by_token: dict[str, float] = {}
    for token_id, logprob in [*list(candidates.items())[:1], *writer.likeliest(candidates)]:
        by_token[_key(writer, token_id)] = finite(logprob)
    return by_token


def _key(writer: LogprobWriter, token_id: int) -> str:
    """A token's text, if no other token looks like it: parts of characters all look alike.

    Those are written as OpenAI does, ``bytes:\\xe2\\x80``; what has no text at all, by its id.
    """
    token = writer.token(token_id)
    if token and _REPLACEMENT not in token:
        return token
    raw = writer.tokenizer.token_bytes(token_id)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if raw else f"token_id:{token_id}"


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """A prompt's logprobs in vLLM's shape."""
    return [None if candidates is None else _prompt_position(candidates) for candidates in positions]


def _prompt_position(candidates: PositionLogprobs) -> dict[int, PromptLogprob]:
    return {
        token_id: PromptLogprob(logprob=finite(entry), rank=entry.rank, decoded_token=entry.decoded_token)
        for token_id, entry in candidates.items()
    }
