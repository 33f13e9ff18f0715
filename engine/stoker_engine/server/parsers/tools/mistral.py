"""Calls of Mistral, for all versions of its tokenizers."""

from __future__ import annotations

import re
import uuid
from typing import ClassVar, Final

from stoker_engine.server.parsers.call_parser import CallParser
from stoker_engine.server.parsers.call_text import Reading
from stoker_engine.server.parsers.json_calls import (
    TOOL_NAME,
    JSONCall,
    arguments_text,
    call_name,
    calls_in_array,
    read_call,
)
from stoker_engine.server.parsers.markers import Markers

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_ID_CHARACTERS: Final = re.compile("[a-zA-Z0-9]*")


class MistralToolParser(CallParser):
    """``[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]``, and since v11 ``[TOOL_CALLS]f[ARGS]{…}`` for each call.

    ``[CALL_ID]`` and an id may precede the arguments (v11), and ``[ARGS]`` may be missing. A single object may stand
    for an array, and ``arguments`` may be missing in objects. Missing ids, and ids other than nine letters and digits,
    are replaced, because Mistral's chat templates reject them.
    """

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _ID, _ARGUMENTS)
    begins = Markers(_BEGIN)

    @staticmethod
    def new_call_id(name: str, call_index: int) -> str:
        """Return an id that Mistral's chat templates accept."""
        return uuid.uuid4().hex[:9]

    def calls(self, begin: str) -> Reading[None]:
        yield from self.text.spaces()
        match (yield from self.text.next()):
            case "[":
                yield from calls_in_array(self.text, _read)
            case "{":
                call = yield from self.text.json()
                self.text.accept(_read(call).parts())
            case _:
                yield from self._named_call()

    def _named_call(self) -> Reading[None]:
        name = yield from self.text.run(TOOL_NAME)
        id = None
        yield from self.text.spaces()
        if (yield from self.text.next()) == "[" and (yield from self.text.text(_ID, _ARGUMENTS)) == _ID:
            id = yield from self.text.run(_ID_CHARACTERS)
            yield from self.text.text(_ARGUMENTS)
        arguments = yield from self.text.json()
        self.text.accept(_identified(JSONCall(call_name(name), arguments_text(arguments), id)).parts())


def _read(text: str) -> JSONCall:
    return _identified(read_call(text, default="{}"))


def _identified(call: JSONCall) -> JSONCall:
    if call.id is not None and len(call.id) == 9 and _ID_CHARACTERS.fullmatch(call.id):
        return call
    return call._replace(id=MistralToolParser.new_call_id(call.name, 0))
