"""Kubernetes' expansion of ``$(NAME)`` in a container's args and env.

    $(NAME)   the value of NAME, or unchanged text if there is no such variable
    $$        one dollar sign

So text that must arrive unchanged, such as a chat template, has its dollar signs doubled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def escape(text: str) -> str:
    """Escape `text` so that Kubernetes' expansion returns it unchanged."""
    return text.replace("$", "$$")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Expand `text` as Kubernetes does."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)
