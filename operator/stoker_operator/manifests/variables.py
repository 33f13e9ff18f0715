"""Kubernetes' own ``$(NAME)``, which it puts values for in a container's args and env.

    $(NAME)   the value of NAME, or the same seven characters where there is no such variable
    $$        one dollar sign

So whatever must arrive as it is, such as a chat template, has its dollar signs doubled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def escape(text: str) -> str:
    """`text` so written that Kubernetes hands it on unchanged."""
    return text.replace("$", "$$")


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` as Kubernetes hands it on."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)
