"""Reading a model's JSON files, which others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker_engine.contract.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: it cannot be read, or holds something else.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError:
        raise ModelError(f"{path} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} holds no JSON object")
    return loaded
