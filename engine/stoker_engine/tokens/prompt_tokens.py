"""Truncates and checks the tokens of a prompt, once per prompt.

Only `prompt_tokens` creates `PromptTokens`. The server, which computes `max_tokens` from the prompt's length and echoes
its text, and `InputProcessor`, which creates the request, take `PromptTokens`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NewType

from stoker_common.errors import RequestError
from stoker_engine.core.engine_info import EngineInfo

#: Valid token ids of a prompt: at least one, all within the model's vocabulary, and short enough for one more token
#: unless the prompt is only scored.
PromptTokens = NewType("PromptTokens", list[int])


def prompt_tokens(
    token_ids: Sequence[int],
    truncate: int | None,
    max_tokens: int | None,
    info: EngineInfo,
    side: Literal["left", "right"] = "left",
) -> PromptTokens:
    """Truncate a prompt, then check it.

    Args:
        truncate: number of tokens to keep; -1: as many as leave room for `max_tokens`; None: all.
        max_tokens: number of tokens to generate; None: as many as fit, at least one; 0: the prompt is only scored.
        side: the side to truncate: ``left`` keeps the last tokens, ``right`` the first.

    Raises:
        RequestError: the prompt is empty, has a token outside the vocabulary, or exceeds the model's context.
    """
    if truncate == -1:
        truncate = max(1, info.max_model_len - (1 if max_tokens is None else max_tokens))
    if truncate is None:
        prompt = list(token_ids)
    else:
        prompt = list(token_ids[-truncate:] if side == "left" else token_ids[:truncate])
    if not prompt:
        raise RequestError("the prompt is empty; it needs at least one token", "prompt")
    if len(prompt) + (max_tokens != 0) > info.max_model_len:
        raise RequestError(
            f"this model's maximum context length is {info.max_model_len} tokens and the prompt has {len(prompt)}; "
            "shorten it",
            "prompt",
            "context_length_exceeded",
        )
    check_vocabulary(prompt, info.vocab_size, "prompt")
    return PromptTokens(prompt)


def check_vocabulary(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Check that all of `token_ids` are within a vocabulary.

    Raises:
        RequestError: one is not; the error names `param`.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise RequestError(f"{param} has a token id outside 0 … {vocab_size - 1}", param)
