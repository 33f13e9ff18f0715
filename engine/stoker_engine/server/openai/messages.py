"""Messages and tools of a chat, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from stoker_engine.server.conversation import messages
from stoker_engine.server.fields.call_arguments import read_arguments
from stoker_engine.server.fields.field_types import StrictModel, or_else
from stoker_engine.server.openai.unsupported import UnsupportedMessageFields
from stoker_engine.server.parsers import tool_use
from stoker_engine.server.parsers.parts import Reasoning

T = TypeVar("T")


class TextPart(StrictModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)],
    or_else('must be a string, or a list of {"type": "text", "text": …} parts; this model reads only text'),
]


class CalledFunction(StrictModel):
    """A called function; `arguments` is an object, or text that is no JSON object, such as an incomplete call's."""

    name: str
    arguments: Annotated[str | dict[str, Any] | None, Field(validate_default=True)] = None

    @field_validator("arguments", mode="after")
    @classmethod
    def _parsed(cls, arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
        """Parse the arguments, which templates expect as an object; text that is no JSON object stays text."""
        if not isinstance(arguments, str):
            return arguments or {}
        parsed = read_arguments(arguments)
        return arguments if parsed is None else parsed


class ToolCall(StrictModel):
    """A tool call, in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streamed calls are numbered, and clients send the number back

    def to_part(self) -> messages.ToolCall:
        """Return the call as part of a `Conversation`."""
        return messages.ToolCall(self.function.name, self.function.arguments, self.id)


class Message(UnsupportedMessageFields, StrictModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    content: Annotated[Content | None, Field(validate_default=True)] = None
    name: str | None = None
    tool_call_id: str | None = None

    @field_validator("tool_calls", "reasoning", "reasoning_content", mode="after")
    @classmethod
    def _check_assistant_only(cls, value: T, info: ValidationInfo) -> T:
        if value and info.data.get("role") not in (None, "assistant"):
            raise PydanticCustomError("shape", "is allowed only in messages of the role assistant")
        return value

    @field_validator("tool_call_id", mode="after")
    @classmethod
    def _check_tool_only(cls, value: T, info: ValidationInfo) -> T:
        if value is not None and info.data.get("role") not in (None, "tool"):
            raise PydanticCustomError("shape", "is allowed only in messages of the role tool")
        return value

    @field_validator("content", mode="after")
    @classmethod
    def _check_not_empty(cls, value: T, info: ValidationInfo) -> T:
        # An answer that is cut off during its reasoning has no content.
        if value is None and not any(info.data.get(name) for name in ("tool_calls", "reasoning", "reasoning_content")):
            raise PydanticCustomError("shape", "is required, except in a message with tool_calls or reasoning")
        return value

    @property
    def text(self) -> str:
        """The text of the message; never null, because templates concatenate it."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def to_message(self) -> messages.Message:
        """Return the message as part of a `Conversation`."""
        if isinstance(self.content, list):
            texts = [messages.Text(part.text, listed=True) for part in self.content]
        else:
            texts = [messages.Text(self.content or "")]
        if self.role == "tool":
            return messages.Message("tool", [messages.ToolResult(texts, self.tool_call_id)], self.name)
        parts: list[messages.Part] = [*texts, *(call.to_part() for call in self.tool_calls or ())]
        if (reasoning := self.reasoning or self.reasoning_content) is not None:
            parts.insert(0, Reasoning(reasoning))
        # `developer` is OpenAI's newer name of the role that most chat templates call `system`.
        return messages.Message("system" if self.role == "developer" else self.role, parts, self.name)


class Function(StrictModel):
    """A function that the model may call; `parameters` is a JSON Schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function

    def to_tool(self) -> tool_use.Tool:
        """Return the tool as part of a `Conversation`."""
        function = self.function
        return tool_use.Tool(function.name, function.description, function.parameters, bool(function.strict))
