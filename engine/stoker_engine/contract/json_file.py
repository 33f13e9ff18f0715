"""Reading a model's JSON files, which others wrote.

Some editors begin a file in UTF-8 with a byte-order mark. It is no part of the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker_common.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: it cannot be read, or holds something else.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return json_object(content, str(path))


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object that is the content of a file.

    Args:
        content: in UTF-8, with a byte-order mark or without.
        name: of the file, for errors.

    Raises:
        ModelError: it holds something else.
    """
    try:
        loaded = json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ModelError(f"{name} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise ModelError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{name} holds no JSON object")
    return loaded
