"""Arguments of a tool call, as the model wrote them → an object for the response or the chat template."""

from __future__ import annotations

import json
from typing import Any

import pydantic_core

from stoker_engine.server.fields.json_text import NotJSONError, parsed


def read_arguments(text: str, *, cut_off: bool = False) -> dict[str, Any] | None:
    """Return the object that `text` encodes, or None if it encodes none. An empty text is an empty object.

    Lone surrogates, which escapes can produce, cannot be sent; they become replacement characters.

    Args:
        cut_off: whether the text may be truncated. Its complete part is read, as clients read it from a stream.
    """
    if not text:
        return {}
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        try:
            value = pydantic_core.from_json(_without_halves(text), allow_inf_nan=False, allow_partial=cut_off)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def _without_halves(text: str) -> str:
    if "\\u" not in text:
        return text
    try:
        written = json.dumps(parsed(text), ensure_ascii=False)
    except NotJSONError:
        return text
    return written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
