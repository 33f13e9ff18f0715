"""Reading of a model's JSON files, which third parties wrote.

Some editors start a UTF-8 file with a byte-order mark, which is skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker_common.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        FileNotFoundError: the file does not exist.
        ModelError: the file cannot be read, or does not contain a JSON object.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return json_object(content, str(path))


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in a file's content.

    Args:
        content: UTF-8, with or without a byte-order mark.
        name: name of the file, for errors.

    Raises:
        ModelError: the content is not a JSON object in UTF-8.
    """
    try:
        loaded = json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ModelError(f"{name} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # invalid UTF-8 or JSON, or an integer with thousands of digits
        raise ModelError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{name} does not contain a JSON object")
    return loaded
