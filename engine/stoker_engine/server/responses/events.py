"""Events of a streamed response, in OpenAI's format and order.

    response.created, response.in_progress
    for each item   response.output_item.added
      text, reasoning   response.content_part.added, ….delta …, ….done, response.content_part.done
      a call            response.function_call_arguments.delta …, ….done
                    response.output_item.done
    response.completed | response.incomplete | response.failed

Events are numbered. If the generation fails, the open item is closed with the text so far.
Format: platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from stoker_engine.server.fields.logprobs import ContentLogprob
from stoker_engine.server.responses.answer import OutputItem, OutputReasoningText, OutputText, Response

ResponseEventType = Literal[
    "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
]
ItemEventType = Literal["response.output_item.added", "response.output_item.done"]
PartEventType = Literal["response.content_part.added", "response.content_part.done"]


class ResponseEvent(BaseModel):
    """State of the whole response."""

    type: ResponseEventType
    sequence_number: int
    response: Response


class ItemEvent(BaseModel):
    """Start or end of an item."""

    type: ItemEventType
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(BaseModel):
    """Start or end of the single part of an item's content."""

    type: PartEventType
    sequence_number: int
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    part: OutputText | OutputReasoningText


class TextDeltaEvent(BaseModel):
    """The next piece of a message's text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    delta: str
    logprobs: list[ContentLogprob]


class TextDoneEvent(BaseModel):
    """All text of a message."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    text: str
    logprobs: list[ContentLogprob]


class ReasoningDeltaEvent(BaseModel):
    """The next piece of the reasoning."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    delta: str


class ReasoningDoneEvent(BaseModel):
    """All text of the reasoning."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: Literal[0] = 0
    text: str


class ArgumentsDeltaEvent(BaseModel):
    """The next piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(BaseModel):
    """All text of a call's arguments."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(BaseModel):
    """The stream failed and cannot continue."""

    type: Literal["error"] = "error"
    sequence_number: int
    code: str | None
    message: str
    param: str | None


Event = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | ErrorEvent
)
