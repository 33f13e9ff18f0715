"""Logprobs in the formats of OpenAI's completions and chats, and of vLLM's prompt logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from stoker_engine.core.logprobs import PositionLogprobs
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.fields.logprobs import ContentLogprob, LogprobWriter, finite

_REPLACEMENT = "\ufffd"


class CompletionLogprobs(BaseModel):
    """Logprobs of /v1/completions: four lists with an entry per token. `text_offset` is in characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatLogprobs(BaseModel):
    """Logprobs of /v1/chat/completions."""

    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """One candidate token of a prompt position, in vLLM's format."""

    logprob: float
    rank: int | None
    decoded_token: str | None


#: Candidates of each prompt position by token id; null for the first, which has no predecessor.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


def logprob_writer(service: Service, top: int | None, as_token_ids: bool | None) -> LogprobWriter | None:
    """Return the logprob writer that a body asks for, or None.

    Args:
        top: number of likeliest candidates per position, -1 for all; None for no logprobs.
        as_token_ids: whether tokens are written as ids; None for the server's default.
    """
    if top is None:
        return None
    if as_token_ids is None:
        as_token_ids = service.args.frontend.return_tokens_as_token_ids
    return LogprobWriter(service.client.tokenizer.vocabulary, top, as_token_ids)


def completion_logprobs(
    writer: LogprobWriter, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], offset: int
) -> tuple[CompletionLogprobs, int]:
    """Return the logprobs of tokens of a completion.

    Args:
        offset: number of characters of the tokens before them.

    Returns:
        (the logprobs, the offset of the next token).
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
    """Return the logprobs of the actual token and of the likeliest ones."""
    by_token: dict[str, float] = {}
    for token_id, logprob in [*list(candidates.items())[:1], *writer.likeliest(candidates)]:
        by_token[_key(writer, token_id)] = finite(logprob)
    return by_token


def _key(writer: LogprobWriter, token_id: int) -> str:
    """Return `writer.token`, or the bytes or id if that is empty or contains U+FFFD, because other tokens may share it.

    Bytes are written in OpenAI's format, ``bytes:\\xe2\\x80``; the id is for a token without bytes.
    """
    token = writer.token(token_id)
    if token and _REPLACEMENT not in token:
        return token
    raw = writer.tokenizer.token_bytes(token_id)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if raw else f"token_id:{token_id}"


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """Return a prompt's logprobs in vLLM's format."""
    return [None if candidates is None else _prompt_position(candidates) for candidates in positions]


def _prompt_position(candidates: PositionLogprobs) -> dict[int, PromptLogprob]:
    return {
        token_id: PromptLogprob(logprob=finite(entry), rank=entry.rank, decoded_token=entry.decoded_token)
        for token_id, entry in candidates.items()
    }
