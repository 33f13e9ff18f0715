"""The config of the model that writes text, in that of one that also reads images or sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Where a config keeps that of its text model.
_TEXT: Final = ("text_config", "llm_config", "language_config")


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a parsed config.json; all of it, where there is no such part."""
    for name in _TEXT:
        inner = config.get(name)
        if isinstance(inner, Mapping) and inner:
            return inner
    return config
