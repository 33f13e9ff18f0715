"""Calls in JSON: ``{"name": "f", "arguments": {…}}``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from stoker_engine.server.fields.json_text import NotJSONError, members, parsed
from stoker_engine.server.parsers.call_text import CallText, NotACallError, Reading
from stoker_engine.server.parsers.parts import Part, tool_call

#: Tool names that are not in quotes.
TOOL_NAME: Final = re.compile(r"[\w.:/-]*")


class JSONCall(NamedTuple):
    """A call as written by the model.

    Attributes:
        arguments: text of a JSON object.
    """

    name: str
    arguments: str
    id: str | None = None

    def parts(self) -> list[Part]:
        """Return the parts of the call."""
        return tool_call(self.name, self.arguments, self.id)


def read_call(text: str, arguments: tuple[str, ...] = ("arguments",), default: str | None = None) -> JSONCall:
    """Return the call that the object `text` describes.

    Args:
        arguments: members that may hold the arguments, in order of preference.
        default: arguments of a call without any; None if they are required.

    Raises:
        NotACallError: `text` describes no call.
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
    """Return `name` if it is a valid tool name.

    Raises:
        NotACallError: `name` is no valid tool name.
    """
    if not isinstance(name, str) or not name or not _can_be_sent(name):
        raise NotACallError
    return name


def arguments_text(text: str) -> str:
    """Return the text of an arguments object: `text` itself, or the JSON inside if the model wrote a JSON string.

    Raises:
        NotACallError: the text is neither.
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
    """Read ``[{…}, …]``, and accept each call when it is complete.

    Raises:
        NotACallError: the text is not such an array, or stops being one.
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
    """Return whether the text has no lone surrogates, which escapes can produce."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
