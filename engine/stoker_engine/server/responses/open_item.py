"""The item that is being written: what there is of it so far, and its events."""

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
    """An item that is not done.

    Args:
        index: its place in the output.
        next_number: numbers events.
    """

    prefix: str

    def __init__(self, index: int, next_number: Callable[[], int]) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._index = index
        self._number = next_number
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What there is of it."""
        return "".join(self._pieces)

    @abc.abstractmethod
    def item(self, status: Status) -> OutputItem:
        """The item as it is now."""

    def begin(self) -> Iterator[Event]:
        """It is started."""
        yield self._item_event("response.output_item.added", "in_progress")

    @abc.abstractmethod
    def add(self, text: str) -> Iterator[Event]:
        """It goes on."""

    def end(self, status: Status) -> Iterator[Event]:
        """It is done."""
        yield self._item_event("response.output_item.done", status)

    def _item_event(self, type: ItemEventType, status: Status) -> ItemEvent:
        return ItemEvent(type=type, sequence_number=self._number(), output_index=self._index, item=self.item(status))


class OpenMessage(OpenItem):
    """What the assistant says."""

    prefix = "msg"

    def __init__(self, index: int, next_number: Callable[[], int]) -> None:
        super().__init__(index, next_number)
        self._logprobs: list[ContentLogprob] = []

    def item(self, status: Status) -> OutputMessage:
        """The message as it is now."""
        return OutputMessage(id=self.id, status=status, content=[self._part()] if self._pieces else [])

    def begin(self) -> Iterator[Event]:
        """It is started."""
        yield from super().begin()
        self._pieces.append("")
        yield self._part_event("response.content_part.added")

    def add(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> Iterator[Event]:
        """It goes on."""
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
        """It is done."""
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
    """What the assistant thinks."""

    prefix = "rs"

    def item(self, status: Status) -> OutputReasoning:
        """The reasoning as it is now."""
        return OutputReasoning(id=self.id, status=status, content=[self._part()] if self._pieces else [])

    def begin(self) -> Iterator[Event]:
        """It is started."""
        yield from super().begin()
        self._pieces.append("")
        yield self._part_event("response.content_part.added")

    def add(self, text: str) -> Iterator[Event]:
        """It goes on."""
        self._pieces.append(text)
        yield ReasoningDeltaEvent(sequence_number=self._number(), item_id=self.id, output_index=self._index, delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        """It is done."""
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
    """A call of a tool.

    Args:
        name: of the tool.
        call_id: by which its output names it; where the model gave it none, it gets one.
    """

    prefix = "fc"

    def __init__(self, index: int, next_number: Callable[[], int], name: str, call_id: str | None) -> None:
        super().__init__(index, next_number)
        self._name = name
        self._call_id = call_id or f"call_{uuid.uuid4().hex}"

    @property
    def is_whole(self) -> bool:
        """Whether its arguments are complete: only then it may be run."""
        return bool(self._pieces) and read_arguments(self.text) is not None

    def item(self, status: Status) -> OutputFunctionCall:
        """The call as it is now."""
        return OutputFunctionCall(
            id=self.id, status=status, call_id=self._call_id, name=self._name, arguments=self.text
        )

    def add(self, text: str) -> Iterator[Event]:
        """Its arguments go on."""
        self._pieces.append(text)
        yield ArgumentsDeltaEvent(sequence_number=self._number(), item_id=self.id, output_index=self._index, delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        """It is done."""
        yield ArgumentsDoneEvent(
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self._index,
            name=self._name,
            arguments=self.text,
        )
        yield from super().end(status)
