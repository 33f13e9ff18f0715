"""Estimate of the tokens that a request will use, from its body. When the request has ended, its actual usage replaces
the estimate.

Prompt tokens are a quarter of the text's bytes, and at most 1,024 for each image or other medium. Output tokens are the
maximum that the body allows.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from stoker_gateway.protocol.paths import COMPLETIONS, FREE

#: Average bytes of text in a token.
TOKEN_BYTES: Final = 4
#: Estimated output tokens of a request that sets no maximum: in general, and for /v1/completions.
DEFAULT_OUTPUT_TOKENS: Final = 1024
DEFAULT_COMPLETION_TOKENS: Final = 16

#: Types of message parts that are media, whose data is in the body.
_MEDIA: Final = frozenset(
    {"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url"}
    | {"file", "input_file", "document"}
)
MAX_MEDIUM_TOKENS: Final = 1024
#: The APIs' names for the maximum number of output tokens. If there are several, the largest counts.
_MAX_TOKENS_NAMES: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
#: Names for the number of outputs that are generated. If there are several, the largest counts.
_NUMBER_NAMES: Final = ("n", "best_of")
#: Upper bounds in the estimate: tokens of one output, and outputs of one prompt.
_MAX_TOKENS: Final = 2**31
_MAX_OUTPUTS: Final = 2**10


def prompt_tokens(fields: dict[str, Any], path: str, size: int) -> int:
    """Estimate the number of prompt tokens.

    Args:
        size: size of the prompt's text in bytes.
    """
    if path in FREE:
        return 0
    return max(1, (size - _excess_of_media(fields)) // TOKEN_BYTES)


def max_output_tokens(fields: dict[str, Any], path: str) -> tuple[int, bool]:
    """Return the maximum number of output tokens of a body, and whether the body sets it.

    Invalid values count as absent; the server rejects them.
    """
    limits = [limit for name in _MAX_TOKENS_NAMES if (limit := _count(fields.get(name))) is not None]
    default = DEFAULT_COMPLETION_TOKENS if path == COMPLETIONS else DEFAULT_OUTPUT_TOKENS
    number = max([1, *(_count(fields.get(name)) or 1 for name in _NUMBER_NAMES)])
    prompt = fields.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return min(max(limits, default=default), _MAX_TOKENS) * min(number, _MAX_OUTPUTS) * prompts, bool(limits)


def _excess_of_media(fields: dict[str, Any]) -> int:
    """Return the number of bytes beyond `MAX_MEDIUM_TOKENS` in each medium, summed over all media."""
    excess = 0
    for name in ("messages", "input"):
        items = fields.get(name)
        for item in items if isinstance(items, list) else ():
            content = item.get("content") if isinstance(item, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") in _MEDIA:
                    excess += max(0, _size(part) - MAX_MEDIUM_TOKENS * TOKEN_BYTES)
    return excess


def _size(part: dict[str, Any]) -> int:
    try:
        return len(orjson.dumps(part))
    except TypeError:  # nested more deeply than servers accept
        return 0


def _count(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
