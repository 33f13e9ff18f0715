"""The messages of a chat, and the tools it may use, in OpenAI's words."""

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
    """What the assistant called; `arguments` is JSON, or whatever the model wrote: a call may be cut off."""

    name: str
    arguments: Annotated[str | dict[str, Any] | None, Field(validate_default=True)] = None

    @field_validator("arguments", mode="after")
    @classmethod
    def _parsed(cls, arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
        """Templates want the arguments parsed; what is no JSON object stays the text that it is."""
        if not isinstance(arguments, str):
            return arguments or {}
        parsed = read_arguments(arguments)
        return arguments if parsed is None else parsed


class ToolCall(StrictModel):
    """One call of a tool, in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams number their calls, and clients send them back so

    def to_part(self) -> messages.ToolCall:
        """The call as a conversation has it."""
        return messages.ToolCall(self.function.name, self.function.arguments, self.id)


class Message(UnsupportedMessageFields, StrictModel):
    """One message of a chat."""

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
            raise PydanticCustomError("shape", "only the assistant's messages have this")
        return value

    @field_validator("tool_call_id", mode="after")
    @classmethod
    def _check_tool_only(cls, value: T, info: ValidationInfo) -> T:
        if value is not None and info.data.get("role") not in (None, "tool"):
            raise PydanticCustomError("shape", "only messages of the role tool have this")
        return value

    @field_validator("content", mode="after")
    @classmethod
    def _check_not_empty(cls, value: T, info: ValidationInfo) -> T:
        # An answer that is cut off while the model reasons has nothing else.
        if value is None and not any(info.data.get(name) for name in ("tool_calls", "reasoning", "reasoning_content")):
            raise PydanticCustomError(
                "shape", "is required; only a message with tool_calls or reasoning may leave it out"
            )
        return value

    @property
    def text(self) -> str:
        """What it says; never null, for templates add it to other text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def to_message(self) -> messages.Message:
        """The message as a conversation has it."""
        if isinstance(self.content, list):
            texts = [messages.Text(part.text, listed=True) for part in self.content]
        else:
            texts = [messages.Text(self.content or "")]
        if self.role == "tool":
            return messages.Message("tool", [messages.ToolResult(texts, self.tool_call_id)], self.name)
        parts: list[messages.Part] = [*texts, *(call.to_part() for call in self.tool_calls or ())]
        if (reasoning := self.reasoning or self.reasoning_content) is not None:
            parts.insert(0, Reasoning(reasoning))
        # `developer` is OpenAI's newer word for what the templates on the hub call `system`.
        return messages.Message("system" if self.role == "developer" else self.role, parts, self.name)


class Function(StrictModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function

    def to_tool(self) -> tool_use.Tool:
        """The tool as a conversation has it."""
        function = self.function
        return tool_use.Tool(function.name, function.description, function.parameters, bool(function.strict))
