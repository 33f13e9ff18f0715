"""How many tokens a request used: by what the answer says, or else by an estimate.

Who says it, and how:

    our engine, in events       prompt_tokens, completion_tokens, cached_tokens
    OpenAI, /v1/completions …   prompt_tokens, completion_tokens, prompt_tokens_details.cached_tokens
    OpenAI, /v1/responses       input_tokens, output_tokens, input_tokens_details.cached_tokens
    Anthropic, /v1/messages     input_tokens, output_tokens, and beside the first: cache_read_input_tokens,
                                cache_creation_input_tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from stoker_gateway.protocol.envoy_headers import USAGES

#: Bytes of text that a token usually has, and of an event with one token.
TOKEN_BYTES: Final = 4
EVENT_BYTES: Final = 220

#: What is counted of an answer.
_ANSWERS: Final = ("completion_tokens", "output_tokens")
#: No request has as many tokens: a larger number is as good as none.
_MAX_COUNT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a request used.

    Attributes:
        prompt: tokens of its prompt, those in `cached` included.
        cached: of these, tokens that did not have to be computed.
        output: tokens of its answer.
        estimated: whether any of them is an estimate.
    """

    prompt: int = 0
    cached: int = 0
    output: int = 0
    estimated: bool = False


def reported(usage: Mapping[str, Any]) -> Tokens | None:
    """What an answer says; None if it says nothing.

    Args:
        usage: the metadata that Envoy made of it.
    """
    objects = {name: _object(usage.get(name)) for name in USAGES}
    for known in (objects["stoker_usage"], _together(objects["message"], objects["usage"], objects["response"])):
        if (tokens := _tokens(known)) is not None:
            return tokens
    return None


def estimated(prompt_bytes: int, answer_bytes: int, *, streamed: bool) -> Tokens:
    """What a request probably used, by the sizes of its body and its answer."""
    return Tokens(
        prompt=-(-prompt_bytes // TOKEN_BYTES),
        output=-(-answer_bytes // (EVENT_BYTES if streamed else TOKEN_BYTES)),
        estimated=True,
    )


def _tokens(known: Mapping[str, Any]) -> Tokens | None:
    prompt, output = _count(known.get("prompt_tokens")), _count(known.get("completion_tokens"))
    cached = _count(known.get("cached_tokens"))
    if cached is None:
        cached = _count(_object(known.get("prompt_tokens_details")).get("cached_tokens"))
    if prompt is None:
        prompt, output = _count(known.get("input_tokens")), _count(known.get("output_tokens"))
        cached = _count(_object(known.get("input_tokens_details")).get("cached_tokens"))
        if prompt is not None and cached is None:
            cached = _count(known.get("cache_read_input_tokens")) or 0
            prompt += cached + (_count(known.get("cache_creation_input_tokens")) or 0)
    if prompt is None:
        return None
    return Tokens(prompt, min(cached or 0, prompt), output or 0)


def _together(*usages: Mapping[str, Any]) -> dict[str, Any]:
    """What several usages of one answer say: each adds to the one before. A prompt gets no shorter: a later one that
    counts none of its tokens does not know them.
    """
    merged: dict[str, Any] = {}
    for usage in usages:
        if _says_prompt(usage) and not any(map(_count, usage.values())):
            merged = {**usage, **merged}  # it knows nothing
            continue
        for name, value in usage.items():
            previous, current = _count(merged.get(name)), _count(value)
            if current is None and previous is not None:
                continue
            merged[name] = value if current is None or previous is None or name in _ANSWERS else max(previous, current)
    return merged


def _says_prompt(usage: Mapping[str, Any]) -> bool:
    return any(_count(usage.get(name)) is not None for name in ("prompt_tokens", "input_tokens"))


def _count(value: Any) -> int | None:
    """A number of tokens, if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_COUNT:
        return None
    return int(value)


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return {}
    return value if isinstance(value, dict) else {}
