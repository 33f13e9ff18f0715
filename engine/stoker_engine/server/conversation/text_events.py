"""Events that differ only in a text, such as nearly all events of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pydantic_core import to_json


class Event(Protocol):
    """An event in an API's format; its `type` is its name if events are named."""

    def model_dump_json(self) -> str:
        """Return the event as JSON."""
        ...


#: Text that no event contains.
_PLACEHOLDER: Final = "\x00text\x00"


@dataclass(frozen=True, slots=True)
class EncodedEvent:
    """An event as JSON, with its name if events are named."""

    data: bytes
    type: str = ""


def encoded(event: Event | EncodedEvent) -> EncodedEvent:
    """Encode an event, unless it is encoded."""
    if isinstance(event, EncodedEvent):
        return event
    return EncodedEvent(event.model_dump_json().encode(), getattr(event, "type", ""))


class TextEvents:
    """Encodes events without building them: the JSON of an example is kept, with gaps for the text.

    Args:
        event: returns the event for a text; each field that depends on the text must equal it.
    """

    def __init__(self, event: Callable[[str], Event]) -> None:
        example = encoded(event(_PLACEHOLDER))
        self._type = example.type
        self._parts = example.data.split(to_json(_PLACEHOLDER))

    def encoded(self, text: str) -> EncodedEvent:
        """Return the event for `text`."""
        return EncodedEvent(to_json(text).join(self._parts), self._type)
