"""JSON embedded in other text: where it ends, and its members as written (RFC 8259)."""

from __future__ import annotations

import enum
import json
import re
from typing import Any, Final, NoReturn

_SPACE: Final = " \t\n\r"

#: Maximum nesting depth; some parsers, including pydantic's, support hardly more.
_DEEPEST: Final = 200

_SPACES: Final = re.compile(f"[{_SPACE}]*")
_SCALAR: Final = re.compile("[-+.0-9Eaeflnrstu]+")  # numbers, true, false, null
_CHARACTERS: Final = re.compile(r'[^"\\\x00-\x1f]*')


class _Expects(enum.Enum):
    """The tokens that may come next, apart from white space."""

    BEGIN = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    COMMA_OR_END = enum.auto()
    NOTHING = enum.auto()


class NotJSONError(ValueError):
    """The text is not JSON, not the beginning of JSON, or exceeds a limit."""


class JSONScanner:
    """Finds the end of an object or array whose text arrives in pieces, in linear time.

    An invalid character is detected immediately, except within numbers, literals and escapes: for these use `parsed`.
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
        """Read `text` from index `at`, and return the index after the characters that belong to the value.

        Raises:
            NotJSONError: its first argument is the index of the invalid character.
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
        if self._in_scalar:  # it may continue in this piece
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
    """Return the value of `text`.

    Raises:
        NotJSONError: `text` is not JSON, or exceeds the limits of parsers: numbers of thousands of digits, deep
            nesting.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise NotJSONError from None
    if isinstance(value, dict | list) and text.count("{") + text.count("[") > _DEEPEST:
        JSONScanner().feed(text)
    return value


def members(text: str) -> dict[str, str]:
    """Return the members of an object; each value as it is written in `text`.

    Raises:
        NotJSONError: `text` is not an object.
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
    """Return the end of the longest match of `pattern` at index `at`."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _refuse(constant: str) -> NoReturn:
    raise NotJSONError(constant)  # JSON has no NaN and no infinities
