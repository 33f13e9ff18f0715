"""How many tokens a request may use, by its body alone; when it has ended, what it used counts instead.

A prompt's tokens are a quarter of its text's bytes, those of an image or another medium in it at most 1,024. An
answer's are the most that the body allows.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from stoker_gateway.protocol.paths import COMPLETIONS, FREE

#: Bytes of text that a token stands for, in the mean.
TOKEN_BYTES: Final = 4
#: What an answer counts where the body does not say its length: in the older API its own default, else this.
DEFAULT_ANSWER_TOKENS: Final = 1024
DEFAULT_COMPLETION_TOKENS: Final = 16

#: What parts of messages are called that are media, with their bytes in the body.
_MEDIA: Final = frozenset(
    {"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url"}
    | {"file", "input_file", "document"}
)
MAX_MEDIUM_TOKENS: Final = 1024
#: What the APIs call the most tokens of an answer. Of several, the largest counts.
_MAX_TOKENS_NAMES: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
#: How many answers there are, or are tried. The same.
_NUMBER_NAMES: Final = ("n", "best_of")
#: What larger numbers count as. No server takes those.
_MAX_TOKENS: Final = 2**31
_MAX_ANSWERS: Final = 2**10


def prompt_tokens(fields: dict[str, Any], path: str, size: int) -> int:
    """How many tokens a prompt has.

    Args:
        size: bytes of its text.
    """
    if path in FREE:
        return 0
    return max(1, (size - _excess_of_media(fields)) // TOKEN_BYTES)


def answer_tokens(fields: dict[str, Any], path: str) -> tuple[int, bool]:
    """How many tokens the answers to a body may have, and whether it says so.

    Numbers that no server takes count as absent; who sends them is told by the server.
    """
    limits = [limit for name in _MAX_TOKENS_NAMES if (limit := _count(fields.get(name))) is not None]
    default = DEFAULT_COMPLETION_TOKENS if path == COMPLETIONS else DEFAULT_ANSWER_TOKENS
    number = max([1, *(_count(fields.get(name)) or 1 for name in _NUMBER_NAMES)])
    prompt = fields.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return min(max(limits, default=default), _MAX_TOKENS) * min(number, _MAX_ANSWERS) * prompts, bool(limits)


def _excess_of_media(fields: dict[str, Any]) -> int:
    """Bytes of media beyond what they count."""
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
    except TypeError:  # nested deeper than any engine reads
        return 0


def _count(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
