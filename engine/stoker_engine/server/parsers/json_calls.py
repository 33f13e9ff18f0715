"""Calls that are written as JSON: ``{"name": "f", "arguments": {…}}``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from stoker_engine.server.fields.json_text import NotJSONError, members, parsed
from stoker_engine.server.parsers.call_text import CallText, NotACallError, Reading
from stoker_engine.server.parsers.parts import Part, tool_call

#: Names of tools where no quotes end them.
TOOL_NAME: Final = re.compile(r"[\w.:/-]*")


class JSONCall(NamedTuple):
    """A call as it was written.

    Attributes:
        arguments: text of a JSON object.
    """

    name: str
    arguments: str
    id: str | None = None

    def parts(self) -> list[Part]:
        """The parts that it is."""
        return tool_call(self.name, self.arguments, self.id)


def read_call(text: str, arguments: tuple[str, ...] = ("arguments",), default: str | None = None) -> JSONCall:
    """The call that the object `text` describes.

    Args:
        arguments: the members that may hold the arguments, the first one that is there does.
        default: the arguments where there are none; None: they are required.

    Raises:
        NotACallError: it describes none.
    """
    try:
        found = members(text)
        name = parsed(found.get("name", "null"))
        id = parsed(found.get("id", "null"))
    except NotJSONError:
        raise NotACallError from None
    written = next((found[member] for member in arguments if member in found), "null")
    if written == "null" and default is not None:
        written = default
    return JSONCall(call_name(name), arguments_text(written), id if isinstance(id, str) else None)


def call_name(name: object) -> str:
    """`name`, which may be a tool's.

    Raises:
        NotACallError: it cannot.
    """
    if not isinstance(name, str) or not name or not _can_be_sent(name):
        raise NotACallError
    return name


def arguments_text(text: str) -> str:
    """The text of an object of arguments: `text` itself, or what it holds where the model wrote a string with JSON.

    Raises:
        NotACallError: it is neither.
    """
    try:
        value = parsed(text)
        if isinstance(value, str):
            text = value
            value = parsed(text)
    except NotJSONError:
        raise NotACallError from None
    if not isinstance(value, dict) or not _can_be_sent(text):
        raise NotACallError
    return text.strip()


def calls_in_array(text: CallText, read: Callable[[str], JSONCall]) -> Reading[None]:
    """Reads ``[{…}, …]``, and has each call accepted once it is complete.

    Raises:
        NotACallError: what comes is none, or does not go on as one.
    """
    yield from text.text("[")
    separator = ","
    while separator == ",":
        call = yield from text.json()
        text.accept(read(call).parts())
        yield from text.spaces()
        separator = yield from text.text(",", "]")
    text.accept([])


def _can_be_sent(text: str) -> bool:
    """Whether it has no half of a character, which escapes can make."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
