"""JSON within other text: where it ends, and what its members are as they are written (RFC 8259)."""

from __future__ import annotations

import enum
import json
import re
from typing import Any, Final, NoReturn

_SPACE: Final = " \t\n\r"

#: Objects and arrays within each other; the readers of clients, and of what comes back to us, go hardly deeper.
_DEEPEST: Final = 200

_SPACES: Final = re.compile(f"[{_SPACE}]*")
_SCALAR: Final = re.compile("[-+.0-9Eaeflnrstu]+")  # numbers, true, false, null
_CHARACTERS: Final = re.compile(r'[^"\\\x00-\x1f]*')


class _Expects(enum.Enum):
    """What may come next, spaces aside."""

    BEGIN = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    COMMA_OR_END = enum.auto()
    NOTHING = enum.auto()


class NotJSONError(ValueError):
    """What was read is not the beginning of JSON."""


class JSONScanner:
    """Finds where an object or an array ends whose text comes in pieces, in time linear in its length.

    Text that cannot go on as JSON is seen at the first character that cannot, but for what is written within numbers,
    words and escapes: `parsed` judges the whole.
    """

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._expects = _Expects.BEGIN
        self._in_string = False
        self._in_scalar = False
        self._escaped = False

    @property
    def ended(self) -> bool:
        """Whether the value is complete."""
        return self._expects is _Expects.NOTHING

    def feed(self, text: str, at: int = 0) -> int:
        """Reads a further piece, `text` from `at` on; where what belongs to the value ends.

        Raises:
            NotJSONError: its first argument is where it cannot go on.
        """
        while at < len(text) and not self.ended:
            at = self._string(text, at) if self._in_string else self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            if text[at] not in '"\\/bfnrtu':
                raise NotJSONError(at)
            self._escaped = False
            at += 1
        at = _end(_CHARACTERS, text, at)
        if at < len(text):
            match text[at]:
                case '"':
                    self._in_string = False
                    is_key = self._expects in (_Expects.KEY, _Expects.KEY_OR_END)
                    self._expects = _Expects.COLON if is_key else _Expects.COMMA_OR_END
                case "\\":
                    self._escaped = True
                case _:
                    raise NotJSONError(at)
            at += 1
        return at

    def _structure(self, text: str, at: int) -> int:
        expects = self._expects
        if self._in_scalar:  # it may have been cut
            at = _end(_SCALAR, text, at)
            self._in_scalar = at == len(text)
        at = _end(_SPACES, text, at)
        if at == len(text):
            return at
        self._in_scalar = False
        character = text[at]
        value = expects in (_Expects.VALUE, _Expects.VALUE_OR_END)
        if character in "{[" and (value or expects is _Expects.BEGIN) and len(self._closing) < _DEEPEST:
            self._closing.append("}" if character == "{" else "]")
            self._expects = _Expects.KEY_OR_END if character == "{" else _Expects.VALUE_OR_END
        elif character == '"' and (value or expects in (_Expects.KEY, _Expects.KEY_OR_END)):
            self._in_string = True
        elif character == ":" and expects is _Expects.COLON:
            self._expects = _Expects.VALUE
        elif character == "," and expects is _Expects.COMMA_OR_END:
            self._expects = _Expects.KEY if self._closing[-1] == "}" else _Expects.VALUE
        elif (
            expects in (_Expects.COMMA_OR_END, _Expects.KEY_OR_END, _Expects.VALUE_OR_END)
            and character == self._closing[-1]
        ):
            self._closing.pop()
            self._expects = _Expects.COMMA_OR_END if self._closing else _Expects.NOTHING
        elif value and _SCALAR.match(character):
            self._in_scalar = True
            self._expects = _Expects.COMMA_OR_END
        else:
            raise NotJSONError(at)
        return at + 1


def parsed(text: str) -> Any:
    """The value of `text`.

    Raises:
        NotJSONError: it is not JSON, or what readers do not bear: numbers of thousands of digits, too deep a value.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise NotJSONError from None
    if isinstance(value, dict | list) and text.count("{") + text.count("[") > _DEEPEST:
        JSONScanner().feed(text)
    return value


def members(text: str) -> dict[str, str]:
    """The members of an object, each value as it is written.

    Raises:
        NotJSONError: `text` is not an object's.
    """
    parsed(text)
    at = _end(_SPACES, text, 0)
    if text[at : at + 1] != "{":
        raise NotJSONError
    found: dict[str, str] = {}
    at = _end(_SPACES, text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _end(_SPACES, text, _end(_SPACES, text, at) + 1)  # after the colon
        _, at = _DECODER.raw_decode(text, begin)
        found[key] = text[begin:at]
        at = _end(_SPACES, text, at)
        if text[at] == ",":
            at = _end(_SPACES, text, at + 1)
    return found


_DECODER: Final = json.JSONDecoder()


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the longest run of `pattern` from `at` on ends."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _refuse(constant: str) -> NoReturn:
    raise NotJSONError(constant)  # NaN and infinities are not JSON's
