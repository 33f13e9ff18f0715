"""Markdown for the generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

#: A flag in plain text, which is shown as code.
_FLAG = re.compile(r"(?<![\w`-])(--[a-z][\w-]*[a-z0-9])")


def prose(text: str) -> str:
    """Return plain text on one line, with flags as code, and without characters that Markdown would interpret."""
    text = " ".join(text.split())
    text = re.sub(r"``(.+?)``", r"`\1`", text)  # reStructuredText's code
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else _escape(part) for part in parts)


def _escape(text: str) -> str:
    text = re.sub(r"([\\<>*\[\]{}])", r"\\\1", text)
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return _FLAG.sub(r"`\1`", text)


def code(text: str) -> str:
    """Return text as code, also with backticks in it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, followed by an empty line; none if it has no rows."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return []
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines, ""]
