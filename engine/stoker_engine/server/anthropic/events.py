"""The events of a streamed message.

https://docs.anthropic.com/en/api/messages-streaming::

    message_start, ping
    for each block: content_block_start, content_block_delta …, content_block_stop
    message_delta (why it ended, usage), message_stop
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel

from stoker_engine.server.anthropic.answer import (
    AnthropicMessage,
    AnthropicUsage,
    Block,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    new_tool_use_id,
)
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart


class MessageStart(BaseModel):
    """Start of a message, without content."""

    type: Literal["message_start"] = "message_start"
    message: AnthropicMessage


class Ping(BaseModel):
    """An event without content, which Anthropic also sends after the start."""

    type: Literal["ping"] = "ping"


class ContentBlockStart(BaseModel):
    """Start of a block, whose content follows."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Block


class TextDelta(BaseModel):
    """The next piece of the text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(BaseModel):
    """The next piece of the reasoning."""

    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(BaseModel):
    """Signature at the end of a thinking block."""

    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputJSONDelta(BaseModel):
    """The next piece of the JSON of a call's input."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class ContentBlockDelta(BaseModel):
    """An addition to a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJSONDelta


class ContentBlockStop(BaseModel):
    """End of a block."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class Stopped(BaseModel):
    """Reason for the end of a message, and the stop sequence if that is the reason."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """Why a message ended, and its token counts."""

    type: Literal["message_delta"] = "message_delta"
    delta: Stopped
    usage: AnthropicUsage


class MessageStop(BaseModel):
    """The last event of a message."""

    type: Literal["message_stop"] = "message_stop"


class BlockEvents:
    """Converts parts to events of blocks; at most one block is open.

    Args:
        show_thinking: whether thinking blocks contain their text, and not only a signature.
    """

    def __init__(self, show_thinking: bool) -> None:
        self._show_thinking = show_thinking
        self._index = -1
        self._open: Block | None = None
        self._thought = hashlib.sha256()

    def write(self, part: Part) -> Iterator[BaseModel]:
        """Yield the events of the next part."""
        match part:
            case Content(text):
                if not isinstance(self._open, TextBlock):
                    yield from self._begin(TextBlock())
                yield self._delta(TextDelta(text=text))
            case Reasoning(text):
                if not isinstance(self._open, ThinkingBlock):
                    self._thought = hashlib.sha256()
                    yield from self._begin(ThinkingBlock())
                self._thought.update(text.encode(errors="replace"))
                if self._show_thinking:
                    yield self._delta(ThinkingDelta(thinking=text))
            case ToolCallStart(name, id):
                yield from self._begin(ToolUseBlock(id=id or new_tool_use_id(), name=name))
            case ToolCallArguments(text):
                yield self._delta(InputJSONDelta(partial_json=text))

    def end(self) -> Iterator[BaseModel]:
        """Yield the events that end the last block; an answer without blocks gets an empty text block."""
        if self._index < 0:
            yield from self._begin(TextBlock())
        yield from self._close()

    def _begin(self, block: Block) -> Iterator[BaseModel]:
        yield from self._close()
        self._index += 1
        self._open = block
        yield ContentBlockStart(index=self._index, content_block=block)

    def _close(self) -> Iterator[BaseModel]:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):
            yield self._delta(SignatureDelta(signature=self._thought.hexdigest()))
        yield ContentBlockStop(index=self._index)
        self._open = None

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJSONDelta) -> ContentBlockDelta:
        return ContentBlockDelta(index=self._index, delta=delta)
