"""Config of the text model within the config of a multimodal model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Fields that may contain the text model's config.
_TEXT: Final = ("text_config", "llm_config", "language_config")


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a parsed config.json, or the whole config if it has no such part."""
    for name in _TEXT:
        inner = config.get(name)
        if isinstance(inner, Mapping) and inner:
            return inner
    return config
