"""Content blocks of messages, and their conversion to parts of a conversation.

https://docs.anthropic.com/en/api/messages. A string stands for one text block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from stoker_engine.server.conversation.messages import Message, Part, Text, ToolCall, ToolResult
from stoker_engine.server.fields.field_types import StrictModel
from stoker_engine.server.fields.unsupported import Absent, NoList, OnlyValue
from stoker_engine.server.parsers.parts import Reasoning

#: Hint where to cache the prompt; ignored, because the prefix cache needs none.
CacheHint = dict[str, Any] | None

#: Start of a system block that Claude Code adds for Anthropic's billing. The block is dropped: it is not meant for the
#: model, and with it requests would share no prefix.
_BILLING: Final = "x-anthropic-billing-header:"


class TextBlockParam(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str
    citations: NoList = None
    cache_control: CacheHint = None


class ThinkingBlockParam(StrictModel):
    """The assistant's reasoning. The signature is not checked, because nothing depends on it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: CacheHint = None


class RedactedThinkingBlockParam(StrictModel):
    """Encrypted reasoning from another server; omitted from the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlockParam(StrictModel):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, OnlyValue({"type": "direct"})] = None
    toolset_name: Absent = None
    cache_control: CacheHint = None


def of_types(*types: str) -> BeforeValidator:
    """Return a validator that refuses blocks of types other than `types`, with an error that names the type."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in types:
            kinds = {"kind": kind[:50], "types": ", ".join(types)}
            raise PydanticCustomError("unsupported", "blocks of type {kind} are not supported, only {types}", kinds)
        return value

    return BeforeValidator(check)


def _as_blocks(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("shape", "must be a string or a list of content blocks")
    return value


_TextBlocks = Annotated[list[Annotated[TextBlockParam, of_types("text")]], Field(fail_fast=True)]
#: A string, or text blocks.
TextParam = Annotated[_TextBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlockParam])]


class ToolResultBlockParam(StrictModel):
    """Result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextParam | None = None
    is_error: bool | None = None
    toolset_name: Absent = None
    cache_control: CacheHint = None

    def to_part(self) -> ToolResult:
        """Return the result for a `Conversation`. Templates have no error flag, so an error's text states it."""
        texts = [block.text for block in self.content or ()] or [""]
        if self.is_error and not texts[0].lower().startswith("error"):
            texts[0] = f"Error: {texts[0]}" if texts[0] or len(texts) > 1 else "Error"
        return ToolResult([Text(text) for text in texts], self.tool_use_id)


BlockParam = Annotated[
    TextBlockParam | ThinkingBlockParam | RedactedThinkingBlockParam | ToolUseBlockParam | ToolResultBlockParam,
    Field(discriminator="type"),
]
_KnownBlock = Annotated[BlockParam, of_types("text", "tool_use", "tool_result", "thinking", "redacted_thinking")]
_Blocks = Annotated[list[_KnownBlock], Field(min_length=1, fail_fast=True)]

_BLOCKS: Final[TypeAdapter[list[BlockParam]]] = TypeAdapter(_Blocks)


def _text_or_blocks(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate without pydantic's union, which would report errors for both members."""
    return value if isinstance(value, str) else _BLOCKS.validate_python(_as_blocks(value))


_ROLES: Final = {
    "tool_use": ("assistant",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
    "tool_result": ("user",),
}


class MessageParam(StrictModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | _Blocks, WrapValidator(_text_or_blocks, json_schema_input_type=str | list[BlockParam])]

    @field_validator("content", mode="after")
    @classmethod
    def _check_role(cls, content: str | list[BlockParam], info: ValidationInfo) -> str | list[BlockParam]:
        role = info.data.get("role")
        for block in content if isinstance(content, list) else ():
            if role not in (None, *_ROLES.get(block.type, (role,))):
                context = {"kind": block.type, "role": _ROLES[block.type][0]}
                raise PydanticCustomError("shape", "{kind} blocks are allowed only in messages of role {role}", context)
        return content

    @property
    def blocks(self) -> Sequence[BlockParam]:
        """The blocks of the message. A string is converted only on use, because there may be very many messages."""
        if isinstance(self.content, str):
            return [TextBlockParam(type="text", text=self.content)]
        return self.content


def plain_messages(
    system: Sequence[TextBlockParam], messages: Sequence[MessageParam], *, system_anywhere: bool
) -> list[Message]:
    """Return the messages of a conversation.

    Consecutive messages of one role are joined, with their texts as parts; each tool result becomes a message.

    Args:
        system_anywhere: whether system messages keep their position; else they are merged with `system`.
    """
    instructions = _for_model(system)
    if not system_anywhere:
        later = (block for message in messages if message.role == "system" for block in message.blocks)
        instructions += _for_model(later)
        messages = [message for message in messages if message.role != "system"]
    plain = [Message("system", instructions)] if instructions else []
    for role, run in groupby(messages, key=lambda message: message.role):
        blocks = [block for message in run for block in message.blocks]
        match role:
            case "assistant":
                plain.append(_assistant(blocks))
            case "system":
                texts = _for_model(blocks)
                plain += [Message("system", texts)] if texts else []
            case _:
                plain += _user(blocks)
    return plain


def _assistant(blocks: Sequence[BlockParam]) -> Message:
    parts: list[Part] = list(_texts(blocks))
    parts += [ToolCall(block.name, block.input, block.id) for block in blocks if isinstance(block, ToolUseBlockParam)]
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlockParam) and block.thinking]:
        parts.insert(0, Reasoning("\n".join(thoughts)))
    return Message("assistant", parts)


def _user(blocks: Sequence[BlockParam]) -> list[Message]:
    with_content = [block for block in blocks if not isinstance(block, TextBlockParam) or block.text]
    if not with_content:
        return [Message("user", [])]
    messages: list[Message] = []
    for is_text, run in groupby(with_content, key=lambda block: isinstance(block, TextBlockParam)):
        if is_text:
            messages.append(Message("user", _texts(run)))
        else:
            messages += [Message("tool", [block.to_part()]) for block in run if isinstance(block, ToolResultBlockParam)]
    return messages


def _texts(blocks: Iterable[BlockParam]) -> list[Text]:
    return [Text(block.text) for block in blocks if isinstance(block, TextBlockParam) and block.text]


def _for_model(blocks: Iterable[BlockParam]) -> list[Text]:
    return [each for each in _texts(blocks) if not each.text.startswith(_BILLING)]
