"""The item that is being written: its content so far, and its events."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Callable, Iterator, Sequence

from stoker_engine.server.fields.call_arguments import read_arguments
from stoker_engine.server.fields.logprobs import ContentLogprob
from stoker_engine.server.responses.answer import (
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
)
from stoker_engine.server.responses.events import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    Event,
    ItemEvent,
    ItemEventType,
    PartEvent,
    PartEventType,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from stoker_engine.server.responses.items import Status


class OpenItem(abc.ABC):
    """An unfinished item.

    Args:
        index: index of the item in the response's output.
        next_number: returns the next event's sequence number.
    """

    prefix: str

    def __init__(self, index: int, next_number: Callable[[], int]) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._index = index
        self._number = next_number
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @abc.abstractmethod
    def item(self, status: Status) -> OutputItem:
        """Return the item's current state."""

    def begin(self) -> Iterator[Event]:
        """Yield the events that start the item."""
        yield self._item_event("response.output_item.added", "in_progress")

    @abc.abstractmethod
    def add(self, text: str) -> Iterator[Event]:
        """Append the next piece of text, and yield its events."""

    def end(self, status: Status) -> Iterator[Event]:
        """Yield the events that end the item."""
        yield self._item_event("response.output_item.done", status)

    def _item_event(self, type: ItemEventType, status: Status) -> ItemEvent:
        return ItemEvent(type=type, sequence_number=self._number(), output_index=self._index, item=self.item(status))


class OpenMessage(OpenItem):
    """A message of the assistant."""

    prefix = "msg"

    def __init__(self, index: int, next_number: Callable[[], int]) -> None:
        super().__init__(index, next_number)
        self._logprobs: list[ContentLogprob] = []

    def item(self, status: Status) -> OutputMessage:
        """Return the message's current state."""
        return OutputMessage(id=self.id, status=status, content=[self._part()] if self._pieces else [])

    def begin(self) -> Iterator[Event]:
        """Yield the events that start the message."""
        yield from super().begin()
        self._pieces.append("")
        yield self._part_event("response.content_part.added")

    def add(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> Iterator[Event]:
        """Yield the event with the next piece of text."""
        self._pieces.append(text)
        self._logprobs += logprobs
        yield TextDeltaEvent(
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self._index,
            delta=text,
            logprobs=list(logprobs),
        )

    def end(self, status: Status) -> Iterator[Event]:
        """Yield the events that end the message."""
        part = self._part()
        yield TextDoneEvent(
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self._index,
            text=part.text,
            logprobs=part.logprobs,
        )
        yield self._part_event("response.content_part.done")
        yield from super().end(status)

    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=list(self._logprobs))

    def _part_event(self, type: PartEventType) -> PartEvent:
        return PartEvent(
            type=type, sequence_number=self._number(), item_id=self.id, output_index=self._index, part=self._part()
        )


class OpenReasoning(OpenItem):
    """Reasoning of the assistant."""

    prefix = "rs"

    def item(self, status: Status) -> OutputReasoning:
        """Return the current state of the reasoning."""
        return OutputReasoning(id=self.id, status=status, content=[self._part()] if self._pieces else [])

    def begin(self) -> Iterator[Event]:
        """Yield the events that start the reasoning."""
        yield from super().begin()
        self._pieces.append("")
        yield self._part_event("response.content_part.added")

    def add(self, text: str) -> Iterator[Event]:
        """Yield the event with the next piece of reasoning."""
        self._pieces.append(text)
        yield ReasoningDeltaEvent(sequence_number=self._number(), item_id=self.id, output_index=self._index, delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        """Yield the events that end the reasoning."""
        yield ReasoningDoneEvent(
            sequence_number=self._number(), item_id=self.id, output_index=self._index, text=self.text
        )
        yield self._part_event("response.content_part.done")
        yield from super().end(status)

    def _part(self) -> OutputReasoningText:
        return OutputReasoningText(text=self.text)

    def _part_event(self, type: PartEventType) -> PartEvent:
        return PartEvent(
            type=type, sequence_number=self._number(), item_id=self.id, output_index=self._index, part=self._part()
        )


class OpenCall(OpenItem):
    """A tool call.

    Args:
        name: name of the tool.
        call_id: id that the tool's result refers to; generated if None.
    """

    prefix = "fc"

    def __init__(self, index: int, next_number: Callable[[], int], name: str, call_id: str | None) -> None:
        super().__init__(index, next_number)
        self._name = name
        self._call_id = call_id or f"call_{uuid.uuid4().hex}"

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are complete, so that the call may be run."""
        return bool(self._pieces) and read_arguments(self.text) is not None

    def item(self, status: Status) -> OutputFunctionCall:
        """Return the call's current state."""
        return OutputFunctionCall(
            id=self.id, status=status, call_id=self._call_id, name=self._name, arguments=self.text
        )

    def add(self, text: str) -> Iterator[Event]:
        """Yield the event with the next piece of arguments."""
        self._pieces.append(text)
        yield ArgumentsDeltaEvent(sequence_number=self._number(), item_id=self.id, output_index=self._index, delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        """Yield the events that end the call."""
        yield ArgumentsDoneEvent(
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self._index,
            name=self._name,
            arguments=self.text,
        )
        yield from super().end(status)
