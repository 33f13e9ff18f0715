"""A prompt's tokens, truncated and checked: once for each prompt, here and nowhere else.

What works with a prompt before its request is made (the server: its length leaves room for so many tokens, its text is
echoed) and what makes the request (`InputProcessor`) take `PromptTokens`, which only `prompt_tokens` makes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NewType

from stoker_common.errors import RequestError
from stoker_engine.core.engine_info import EngineInfo

#: Token ids of a prompt that the engine can take: at least one, all of the model's vocabulary, room for one more
#: unless it is only scored.
PromptTokens = NewType("PromptTokens", list[int])


def prompt_tokens(
    token_ids: Sequence[int],
    truncate: int | None,
    max_tokens: int | None,
    info: EngineInfo,
    side: Literal["left", "right"] = "left",
) -> PromptTokens:
    """Truncates a prompt, then checks it.

    Args:
        truncate: keep so many of its tokens; -1 is as many as leave room for `max_tokens`, None is all.
        max_tokens: what is to be generated; None: as much as fits, at least one token. 0: the prompt is only scored.
        side: which is cut off: the last tokens stay, or, where it is the right one, the first.

    Raises:
        RequestError: nothing is left, a token is not the model's, or the prompt does not fit the model's context.
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
    """Checks that all of `token_ids` are of a vocabulary.

    Raises:
        RequestError: one is not; it names `param`.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise RequestError(f"{param} holds a token id outside 0 … {vocab_size - 1}", param)
