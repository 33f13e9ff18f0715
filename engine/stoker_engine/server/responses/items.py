"""Items of a conversation, and their conversion to messages.

A turn of the assistant is one message for the model, and several items in this API: reasoning, text, calls. Consecutive
items in this order become one message; a second reasoning or text, or an item out of order, starts another. Format:
platform.openai.com/docs/api-reference/responses/create, `input`
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    Field,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from stoker_engine.server.conversation.messages import Message, Part, Text, ToolCall, ToolResult
from stoker_engine.server.fields.call_arguments import read_arguments
from stoker_engine.server.fields.field_types import StrictModel
from stoker_engine.server.fields.unsupported import Absent
from stoker_engine.server.parsers.parts import Reasoning

Status = Literal["in_progress", "completed", "incomplete"]

#: Kinds of parts of the assistant's message, in a message's order.
_REASONING, _CONTENT, _CALL = range(3)


def of_type(subject: str, kinds: Mapping[str, type[BaseModel]], default: str | None = None) -> WrapValidator:
    """Return a validator that tries only the union member that `type` names, so that errors name the invalid field.

    Args:
        subject: plural noun for the values, used in the error for an unknown type.
        default: type of a value without the field `type`.
    """
    known = ", ".join(kinds)

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError("shape", "must be an object")
        name = value.get("type", default)
        kind = kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            of_what_type = "without a type" if name is None else f"of the type {json.dumps(name)[:80]}"
            sentence = f"{subject} {of_what_type} are not supported; supported types: {known}"
            raise PydanticCustomError("unsupported", "{sentence}", {"sentence": sentence})
        return kind.model_validate(value)

    return WrapValidator(validate)


class TextPart(StrictModel):
    """A piece of text. Annotations and logprobs, which clients send back, are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(StrictModel):
    """A refusal of another server's model."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the refusal."""
        return self.refusal


Parts = Annotated[
    list[
        Annotated[
            TextPart | RefusalPart,
            of_type("parts", {"input_text": TextPart, "output_text": TextPart, "refusal": RefusalPart}),
        ]
    ],
    Field(fail_fast=True),
]


def _text_or_parts(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("shape", "must be a string or a list of parts")
    return _PARTS.validate_python(value)


_PARTS: Final[TypeAdapter[list[TextPart | RefusalPart]]] = TypeAdapter(Parts)
TextOrParts = Annotated[str | Parts, WrapValidator(_text_or_parts)]


class MessageItem(StrictModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # label of OpenAI's models; ignored


class FunctionCallItem(StrictModel):
    """A tool call of the assistant; `arguments` is JSON, or any text, because a model may write an incomplete call."""

    type: Literal["function_call"]
    call_id: str
    name: str
    status: Status | None = None
    arguments: str
    id: str | None = None
    namespace: Absent = None
    caller: Absent = None


class FunctionCallOutputItem(StrictModel):
    """Result of a tool."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    namespace: Absent = None
    caller: Absent = None


class ReasoningText(StrictModel):
    """A piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of the assistant."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: Absent = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary if the item has only that."""
        return "\n".join(piece.text for piece in self.content or self.summary or ())


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem,
    of_type(
        "items",
        {
            "message": MessageItem,
            "function_call": FunctionCallItem,
            "function_call_output": FunctionCallOutputItem,
            "reasoning": ReasoningItem,
        },
        default="message",
    ),
]
Items = Annotated[list[Item], Field(fail_fast=True)]
_ITEM: Final[TypeAdapter[Item]] = TypeAdapter(Item)
_ITEMS: Final[TypeAdapter[list[Item]]] = TypeAdapter(Items)


def _text_or_items(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("shape", "must be a string or a non-empty list of items")
    return _ITEMS.validate_python(value)


Input = Annotated[str | Items, WrapValidator(_text_or_items)]


def from_json(items: bytes) -> list[Item]:
    """Parse items that `to_json` wrote."""
    return _ITEMS.validate_json(items)


def to_json(items: list[Item]) -> bytes:
    """Return items as JSON, without null fields."""
    return _ITEMS.dump_json(items, exclude_none=True)


def named(item: Item) -> Item:
    """Return the item with its id, or with a new id if it has none."""
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}[item.type]
    return item if item.id is not None else item.model_copy(update={"id": f"{prefix}_{uuid.uuid4().hex}"})


def of_output(item: BaseModel) -> Item:
    """Convert an output item to an item of the continued conversation, without logprobs."""
    return _ITEM.validate_python(item.model_dump(exclude={"content": {"__all__": {"logprobs"}}}))


def listed(item: Item) -> dict[str, Any]:
    """Return the item as an entry of `ItemList`, with string content as a text part."""
    written = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        written["content"] = [{"type": kind, "text": item.content}]
    return written


def messages(items: Iterable[Item]) -> list[Message]:
    """Convert the items of a conversation to messages."""
    turns: list[Message] = []
    open_parts: list[Part] | None = None  # parts of the assistant's message that the next item may join
    last = _CALL
    part: Part
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                kind, part = _CONTENT, Text(_joined(item.content))
            case ReasoningItem():
                if not item.text:
                    continue
                kind, part = _REASONING, Reasoning(item.text)
            case FunctionCallItem():
                arguments = read_arguments(item.arguments)
                call = ToolCall(item.name, item.arguments if arguments is None else arguments, item.call_id)
                kind, part = _CALL, call
            case FunctionCallOutputItem():
                turns.append(Message("tool", [ToolResult(_texts(item.output), item.call_id)]))
                open_parts = None
                continue
            case MessageItem():
                # `developer` is OpenAI's newer name of the role that most chat templates call `system`.
                turns.append(Message("user" if item.role == "user" else "system", _texts(item.content)))
                open_parts = None
                continue
        if open_parts is not None and (kind > last or kind == last == _CALL):
            open_parts.append(part)
        else:
            open_parts = [part]
            turns.append(Message("assistant", open_parts))
        last = kind
    return turns


def _texts(content: str | list[TextPart | RefusalPart]) -> list[Text]:
    if isinstance(content, str):
        return [Text(content)]
    return [Text(part.text, listed=True) for part in content]


def _joined(content: str | list[TextPart | RefusalPart]) -> str:
    """Return the concatenated text of an assistant's message."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
