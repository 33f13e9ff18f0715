"""Parsers of forced calls in vLLM's formats (see `tool_use`). The calls are streamed as they arrive.

The grammar allows only calls, so arguments are never held back. If the answer is cut off, the last call's arguments
may be incomplete; a call with an incomplete name is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from stoker_engine.server.fields.json_text import JSONScanner, NotJSONError, parsed
from stoker_engine.server.parsers.parts import Content, Part, ToolCallArguments, ToolCallStart, merged
from stoker_engine.server.parsers.tool_use import Tool

#: Returns the id of a call, given its tool's name and its index in the answer; None if any id will do.
NewID = Callable[[str, int], str | None]


class NamedCall:
    """A call of the only allowed tool: the text is its arguments."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[Tool], new_id: NewID) -> None:
        self._name = tools[0].name
        self._new_id = new_id
        self._arguments: _Arguments | None = None
        self._more = False  # whether text follows the arguments

    def feed(self, text: str) -> list[Part]:
        """Return the parts of the next piece of text."""
        if self._arguments is None:
            text = text.lstrip()
            if not text:
                return []
            self._arguments = _Arguments()
            return [ToolCallStart(self._name, self._new_id(self._name, 0)), *self.feed(text)]
        arguments, remainder = self._arguments.feed(text)
        if not self._more:
            remainder = remainder.lstrip()
        self._more = self._more or bool(remainder)
        return merged([ToolCallArguments(arguments), Content(remainder)])

    def end(self) -> list[Part]:
        """Return nothing, because no text is held back."""
        return []

    @property
    def is_within_call(self) -> bool:
        """Whether the call has started, but is incomplete."""
        return self._arguments is not None and not self._arguments.are_whole


#: A JSON string without escaped surrogates: a name with lone surrogates could not be sent.
_STRING: Final = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*"'
_NAME: Final = rf'\{{\s*"name"\s*:\s*({_STRING})'
_FIRST: Final = re.compile(rf"\s*\[\s*{_NAME}")
_NEXT: Final = re.compile(rf"\s*\}}\s*,\s*{_NAME}")
_PARAMETERS: Final = re.compile(r'\s*,\s*"parameters"\s*:\s*(?=\{)')
_CLOSED: Final = re.compile(r"\s*\}?\s*,?\s*\]?\s*")


class RequiredCalls:
    """Calls in a JSON list, each an object with `name` and `parameters`, in this order."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[Tool], new_id: NewID) -> None:
        self._new_id = new_id
        self._num_calls = 0
        self._text = ""  # unread text
        self._awaited: re.Pattern[str] | None = _FIRST  # None while reading the arguments of a call
        self._arguments = _Arguments()

    def feed(self, text: str) -> list[Part]:
        """Return the parts of the next piece of text."""
        self._text += text
        parts: list[Part] = []
        while self._text:
            if self._awaited is None:
                arguments, self._text = self._arguments.feed(self._text)
                if arguments:
                    parts.append(ToolCallArguments(arguments))
                if self._arguments.ended:
                    self._awaited = _NEXT
            elif (found := self._awaited.match(self._text)) is None:
                return parts
            elif self._awaited is _PARAMETERS:
                self._awaited, self._arguments = None, _Arguments()
                self._text = self._text[found.end() :]
            else:
                name = json.loads(found[1])
                parts.append(ToolCallStart(name, self._new_id(name, self._num_calls)))
                self._num_calls += 1
                self._awaited = _PARAMETERS
                self._text = self._text[found.end() :]
        return parts

    def end(self) -> list[Part]:
        """Return unread text as content, except JSON syntax after a call or its name."""
        if self._awaited is _PARAMETERS:
            return []
        closed = _CLOSED.match(self._text) if self._awaited is _NEXT else None
        remainder = self._text if closed is None else self._text[closed.end() :]
        return [Content(remainder)] if remainder.strip() else []

    @property
    def is_within_call(self) -> bool:
        """Whether the last call is incomplete."""
        has_started = self._awaited is not _PARAMETERS
        return self._num_calls > 0 and not (has_started and self._arguments.are_whole)


class _Arguments:
    """Finds the end of a JSON object.

    Attributes:
        ended: whether the object is complete or invalid, so that no further text belongs to it.
    """

    def __init__(self) -> None:
        self._scanner = JSONScanner()
        self._pieces: list[str] = []
        self.ended = False

    def feed(self, text: str) -> tuple[str, str]:
        """Split `text` into the part that belongs to the object, and the rest."""
        if self.ended:
            return "", text
        try:
            length = self._scanner.feed(text)
        except NotJSONError as error:
            length, self.ended = error.args[0], True
        self.ended = self.ended or self._scanner.ended
        self._pieces.append(text[:length])
        return text[:length], text[length:]

    @property
    def are_whole(self) -> bool:
        """Whether the object is complete and valid."""
        if not self._scanner.ended:
            return False
        try:
            return isinstance(parsed("".join(self._pieces)), dict)
        except NotJSONError:
            return False


def forced_calls(mode: str) -> Callable[[Sequence[Tool], NewID], NamedCall | RequiredCalls]:
    """Return the parser for a `ToolUse.mode` that forces calls."""
    return NamedCall if mode == "named" else RequiredCalls
