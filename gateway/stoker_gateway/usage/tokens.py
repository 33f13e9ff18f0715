"""Token usage of a request: reported by the response, or estimated.

Usage fields by source:

    Stoker's `stoker_usage`     prompt_tokens, completion_tokens, cached_tokens
    OpenAI, /v1/completions …   prompt_tokens, completion_tokens, prompt_tokens_details.cached_tokens
    OpenAI, /v1/responses       input_tokens, output_tokens, input_tokens_details.cached_tokens
    Anthropic, /v1/messages     input_tokens, output_tokens; input_tokens excludes cache_read_input_tokens and
                                cache_creation_input_tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from stoker_gateway.protocol.envoy_headers import USAGES

#: Assumed average bytes of a token's text, and of a stream event with one token.
TOKEN_BYTES: Final = 4
EVENT_BYTES: Final = 220

#: Usage fields with the number of output tokens.
_OUTPUT_NAMES: Final = ("completion_tokens", "output_tokens")
#: Token counts of this size and larger are ignored.
_MAX_COUNT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that a request used.

    Attributes:
        prompt: prompt tokens, including those in `cached`.
        cached: prompt tokens from the prefix cache.
        output: output tokens.
        estimated: whether any of the values is an estimate.
    """

    prompt: int = 0
    cached: int = 0
    output: int = 0
    estimated: bool = False


def reported(usage: Mapping[str, Any]) -> Tokens | None:
    """Return the usage that a response reports; None if it reports no prompt tokens.

    Args:
        usage: metadata that Envoy extracted from the response.
    """
    objects = {name: _object(usage.get(name)) for name in USAGES}
    for known in (objects["stoker_usage"], _merged(objects["message"], objects["usage"], objects["response"])):
        if (tokens := _tokens(known)) is not None:
            return tokens
    return None


def estimated(prompt_bytes: int, response_bytes: int, *, streamed: bool) -> Tokens:
    """Estimate the usage from the sizes of the request's and the response's bodies."""
    return Tokens(
        prompt=-(-prompt_bytes // TOKEN_BYTES),
        output=-(-response_bytes // (EVENT_BYTES if streamed else TOKEN_BYTES)),
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


def _merged(*usages: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several usages of one response; later output counts replace earlier ones. Prompt counts never decrease,
    because a later usage may report 0 for unknown counts."""
    merged: dict[str, Any] = {}
    for usage in usages:
        if _has_prompt_count(usage) and not any(map(_count, usage.values())):
            merged = {**usage, **merged}  # all counts are 0 or absent, so earlier values take precedence
            continue
        for name, value in usage.items():
            previous, current = _count(merged.get(name)), _count(value)
            if current is None and previous is not None:
                continue
            merged[name] = (
                value if current is None or previous is None or name in _OUTPUT_NAMES else max(previous, current)
            )
    return merged


def _has_prompt_count(usage: Mapping[str, Any]) -> bool:
    return any(_count(usage.get(name)) is not None for name in ("prompt_tokens", "input_tokens"))


def _count(value: Any) -> int | None:
    """Return a value as a token count; None if it is invalid."""
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
