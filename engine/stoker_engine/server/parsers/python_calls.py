"""Calls in Python syntax, with literals as arguments: ``f(a=1, b=["x", None])``.

https://docs.python.org/3/reference/lexical_analysis.html#literals
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from stoker_engine.server.parsers.call_text import CallText, NotACallError, Reading
from stoker_engine.server.parsers.json_calls import call_name
from stoker_engine.server.parsers.parts import Part, tool_call

#: Maximum nesting depth of lists and dicts.
_DEEPEST: Final = 64

#: Tool names may contain dots and hyphens, and argument names may be Python keywords: both are common.
_NAME: Final = re.compile(r"[\w.-]*")
_WORD: Final = re.compile(r"[-+\w.]*")
_NUMBER: Final = re.compile(
    r"[-+]?(?:(0|[1-9][0-9_]*)|[0-9]+\.[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.ASCII | re.IGNORECASE
)
#: Python's and JSON's constants; models write both.
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

_ESCAPE: Final = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED: Final = {"\n": "", "\\": "\\", "'": "'", '"': '"'} | dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))
_LINE_ENDS: Final = r"\r\n"
_PLAIN: Final = {
    (quote, long): re.compile(f"[^\\\\{quote}{'' if long else _LINE_ENDS}]*")
    for quote in "\"'"
    for long in (False, True)
}


def read_call(text: CallText) -> Reading[list[Part]]:
    """Read a call with named arguments.

    Raises:
        NotACallError: the text is no such call.
    """
    yield from text.spaces()
    name = yield from text.run(_NAME)
    yield from text.spaces()
    yield from text.text("(")
    if not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
        raise NotACallError
    arguments: dict[str, Any] = {}
    yield from text.spaces()
    while (yield from text.next()) != ")":
        argument = yield from text.run(_NAME)
        yield from text.spaces()
        yield from text.text("=")
        if not argument.isidentifier() or argument in arguments:
            raise NotACallError
        arguments[argument] = yield from _value(text)
        yield from _comma(text, ")")
    yield from text.text(")")
    return tool_call(call_name(name), _json(arguments))


def _value(text: CallText, depth: int = 0) -> Reading[Any]:
    yield from text.spaces()
    match (yield from text.next()):
        case "'" | '"':
            return (yield from _strings(text))
        case "[" | "(" | "{" if depth == _DEEPEST:
            raise NotACallError
        case "[":
            return (yield from _items(text, "[", "]", depth))
        case "(":
            return (yield from _items(text, "(", ")", depth))
        case "{":
            return (yield from _dict(text, depth))
    word = yield from text.run(_WORD)
    if word in _WORDS:
        return _WORDS[word]
    if (number := _NUMBER.fullmatch(word)) is None:
        raise NotACallError
    try:
        return int(word) if number[1] and not number[2] else float(word)
    except ValueError:  # thousands of digits
        raise NotACallError from None


def _items(text: CallText, begin: str, end: str, depth: int) -> Reading[Any]:
    """Read a list or a tuple, both lists in JSON; a single value in parentheses is that value."""
    yield from text.text(begin)
    items: list[Any] = []
    yield from text.spaces()
    comma = False
    while (yield from text.next()) != end:
        items.append((yield from _value(text, depth + 1)))
        comma = yield from _comma(text, end)
    yield from text.text(end)
    return items[0] if end == ")" and len(items) == 1 and not comma else items


def _dict(text: CallText, depth: int) -> Reading[dict[str, Any]]:
    yield from text.text("{")
    items: dict[str, Any] = {}
    yield from text.spaces()
    while (yield from text.next()) != "}":
        key = yield from _value(text, depth + 1)
        if isinstance(key, (list, dict)):
            raise NotACallError
        yield from text.spaces()
        yield from text.text(":")
        items[key] = yield from _value(text, depth + 1)
        yield from _comma(text, "}")
    yield from text.text("}")
    return items


def _comma(text: CallText, end: str) -> Reading[bool]:
    """Read the comma after an item, unless `end` follows; return whether there was one."""
    yield from text.spaces()
    if (yield from text.next()) == end:
        return False
    yield from text.text(",")
    yield from text.spaces()
    return True


def _strings(text: CallText) -> Reading[str]:
    """Read a string, or several adjacent ones, which Python joins."""
    strings: list[str] = []
    while (quote := (yield from text.next())) in ("'", '"'):
        strings.append((yield from _string(text, quote)))
        yield from text.spaces()
    return "".join(strings)


def _string(text: CallText, quote: str) -> Reading[str]:
    yield from text.text(quote)
    long = False
    if (yield from text.next()) == quote:
        yield from text.text(quote)
        if (yield from text.next()) != quote:
            return ""
        yield from text.text(quote)
        long = True
    pieces: list[str] = []
    while True:
        pieces.append((yield from text.run(_PLAIN[quote, long])))
        match (yield from text.next()):
            case "\\":
                yield from text.text("\\")
                pieces.append("\\" + (yield from text.one()))
            case "" | "\r" | "\n":
                raise NotACallError
            case _:
                quotes = 0
                while quotes < (3 if long else 1) and (yield from text.next()) == quote:
                    yield from text.text(quote)
                    quotes += 1
                if quotes == (3 if long else 1):
                    return _ESCAPE.sub(_unescaped, "".join(pieces))
                pieces.append(quote * quotes)


def _unescaped(escape: re.Match[str]) -> str:
    octal, *hexadecimal, character = escape.groups()
    if character is not None:
        if character in "xuUN":  # an incomplete escape, or a character's name
            raise NotACallError
        return _ESCAPED.get(character, escape[0])
    code = int(octal, 8) if octal else int(next(filter(None, hexadecimal)), 16)
    if code > 0x10FFFF:
        raise NotACallError
    return chr(code)


def _json(arguments: dict[str, Any]) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # lone surrogates stay escapes, as in JSON
        return json.dumps(arguments)
    except ValueError:  # a number beyond the range of float
        raise NotACallError from None
    return text
