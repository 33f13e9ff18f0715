"""The arguments of a call, as the model wrote them → an object that can be sent and read."""

from __future__ import annotations

import json
from typing import Any

import pydantic_core

from stoker_engine.server.fields.json_text import NotJSONError, parsed


def read_arguments(text: str, *, cut_off: bool = False) -> dict[str, Any] | None:
    """The object that `text` is; None where it is none. No arguments are an empty object.

    Half of a character, which an escape can make, cannot be sent: it becomes a replacement character.

    Args:
        cut_off: the text may end anywhere. What is complete of it is read, as clients read it from a stream.
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
