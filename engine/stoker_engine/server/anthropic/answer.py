"""The answer of a chat run as Anthropic's message."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.server.conversation.usage import Usage
from stoker_engine.server.fields.call_arguments import read_arguments
from stoker_engine.server.fields.field_types import Extra
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(BaseModel):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str = ""


class ThinkingBlock(BaseModel):
    """The model's reasoning. Clients send it back with its signature; some omit blocks without a signature."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(BaseModel):
    """A tool call."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(BaseModel):
    """Parts of `output_tokens`."""

    thinking_tokens: int


class AnthropicUsage(BaseModel):
    """Token counts. As at Anthropic, `input_tokens` excludes prompt tokens that are reported as cached."""

    input_tokens: int
    cache_creation_input_tokens: Extra[int] = None
    cache_read_input_tokens: Extra[int] = None
    output_tokens: int
    output_tokens_details: Extra[OutputTokensDetails] = None

    @classmethod
    def of(cls, usage: Usage) -> AnthropicUsage:
        """Convert to Anthropic's counts."""
        counted = cls(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens)
        if usage.cached_tokens is not None:
            counted.input_tokens -= usage.cached_tokens
            counted.cache_read_input_tokens = usage.cached_tokens
            counted.cache_creation_input_tokens = 0  # filling the prefix cache is free
        if usage.reasoning_tokens is not None:
            counted.output_tokens_details = OutputTokensDetails(thinking_tokens=usage.reasoning_tokens)
        return counted


class AnthropicMessage(BaseModel):
    """Response of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class MessageTokensCount(BaseModel):
    """Response of /v1/messages/count_tokens."""

    input_tokens: int


def content_blocks(parts: Sequence[Part], *, show_thinking: bool) -> list[Block]:
    """Return the blocks of a complete answer, in the model's order.

    An empty answer has one empty text block, because many clients read the first block.
    """
    blocks: list[Block] = []
    for part in merged(parts):
        match part:
            case Content(text):
                blocks.append(TextBlock(text=text))
            case Reasoning(text):
                blocks.append(ThinkingBlock(thinking=text if show_thinking else "", signature=signature(text)))
            case ToolCallStart(name, id):
                blocks.append(ToolUseBlock(id=id or new_tool_use_id(), name=name))
            case ToolCallArguments(text):
                call = blocks[-1]
                assert isinstance(call, ToolUseBlock)
                call.input = read_arguments(text, cut_off=True) or {}
    return blocks or [TextBlock()]


def signature(thinking: str) -> str:
    """Return the SHA-256 hash of a thinking block's text, in place of Anthropic's signature."""
    return hashlib.sha256(thinking.encode(errors="replace")).hexdigest()


def new_tool_use_id() -> str:
    """Return an id for a call to which the model gave none."""
    return f"toolu_{uuid.uuid4().hex[:24]}"


def stop_reason(
    finish_reason: FinishReason | None, stopped_by: int | str | None, *, calls: bool, bent: bool
) -> tuple[StopReason, str | None]:
    """Return the reason for an answer's end, and the stop sequence if that is the reason.

    Args:
        stopped_by: stop string or token that ended the answer, if any.
        calls: see `ChatRun.ends_with_call`.
        bent: whether the context left room for fewer tokens than `max_tokens`.
    """
    if finish_reason == FinishReason.LENGTH:
        return ("model_context_window_exceeded" if bent else "max_tokens"), None
    if calls:
        return "tool_use", None
    if isinstance(stopped_by, str):
        return "stop_sequence", stopped_by
    return "end_turn", None
