"""Parsing and formatting of a key's fields. Parsers raise ValueError with a message for the user."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from stoker_gateway.keys.key import KEY_ID, MAX_PRIORITY

#: Maximum value of a limit.
MAX_LIMIT: Final = 10**12
#: Maximum number of characters of an invalid value in a message.
_SHOWN: Final = 80
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.ASCII)
_INTEGER: Final = re.compile(r"-?[0-9]{1,15}")


def key_id(text: str) -> str:
    """Parse the id of a key."""
    if not KEY_ID.fullmatch(text):
        raise ValueError(
            f"{shown(text)} is not a valid key id; use up to 40 of a-z, 0-9 and -, and do not begin or end with -"
        )
    return text


def model(text: str) -> str:
    """Parse a served name, in which ``*`` stands for any characters."""
    if not text or not text.isprintable() or text != text.strip():
        raise ValueError(f"{shown(text)} is not a model name; write it as clients send it, with * for any characters")
    return text


def limit(text: str) -> int:
    """Parse a limit."""
    number = _integer(text)
    if number is None or not 1 <= number <= MAX_LIMIT:
        raise ValueError(f"{shown(text)} is not an integer from 1 to {MAX_LIMIT}; leave it out for no limit")
    return number


def priority(text: str) -> int:
    """Parse a priority."""
    number = _integer(text)
    if number is None or abs(number) > MAX_PRIORITY:
        raise ValueError(f"{shown(text)} is not an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return number


def moment(text: str) -> float:
    """Parse a time in RFC 3339 format, and return seconds since 1970."""
    try:
        if _TIME.fullmatch(text):
            return datetime.fromisoformat(text).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{shown(text)} is not a time in RFC 3339 format; write it like 2030-01-31T12:00:00Z")


def moment_text(seconds: float) -> str:
    """Format seconds since 1970 in RFC 3339 format, rounded down to a second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _integer(text: str) -> int | None:
    return int(text) if _INTEGER.fullmatch(text) else None


def shown(text: str) -> str:
    """Return an invalid value as messages show it."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
