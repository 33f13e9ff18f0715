"""Response bodies in OpenAI's format, with vLLM's extensions.

Fields that OpenAI always sends are null if unset; other unset fields are omitted (`Extra`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.server.conversation import usage
from stoker_engine.server.fields.field_types import Extra
from stoker_engine.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs

#: Finish reason of a chat, which may end with tool calls.
ChatFinishReason = FinishReason | Literal["tool_calls"]


class PromptTokensDetails(BaseModel):
    """Number of prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Number of generated tokens that are reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts, of all choices or of one."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Extra[PromptTokensDetails] = None
    completion_tokens_details: Extra[CompletionTokensDetails] = None

    @classmethod
    def of(cls, counted: usage.Usage) -> Usage:
        """Convert to OpenAI's format."""
        cached, reasoning = counted.cached_tokens, counted.reasoning_tokens
        return cls(
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            total_tokens=counted.prompt_tokens + counted.completion_tokens,
            prompt_tokens_details=None if cached is None else PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=(
                None if reasoning is None else CompletionTokensDetails(reasoning_tokens=reasoning)
            ),
        )


class CompletionChoice(BaseModel):
    """One completion, or an event's addition to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: Extra[int | str] = None
    token_ids: Extra[list[int]] = None
    prompt_token_ids: Extra[list[int]] = None
    prompt_logprobs: Extra[PromptLogprobs] = None


class Completion(BaseModel):
    """Response of /v1/completions, or an event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Extra[Usage] = None


class CalledFunction(BaseModel):
    """A called function; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """The assistant's message; `content` may be null with reasoning or tool calls. Both reasoning fields are equal."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: Extra[str] = None
    reasoning_content: Extra[str] = None
    tool_calls: Extra[list[ToolCall]] = None


class FunctionDelta(BaseModel):
    """An event's addition to a called function."""

    name: Extra[str] = None
    arguments: str


class ToolCallDelta(BaseModel):
    """An event's addition to a call."""

    index: int
    id: Extra[str] = None
    type: Extra[Literal["function"]] = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """An event's addition to a message."""

    role: Extra[Literal["assistant"]] = None
    content: Extra[str] = None
    reasoning: Extra[str] = None
    reasoning_content: Extra[str] = None
    tool_calls: Extra[list[ToolCallDelta]] = None


class ChatChoice(BaseModel):
    """One complete message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: Extra[int | str] = None
    token_ids: Extra[list[int]] = None


class ChatCompletion(BaseModel):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Extra[list[int]] = None
    prompt_logprobs: Extra[PromptLogprobs] = None


class ChatChunkChoice(BaseModel):
    """An event's addition to one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: Extra[int | str] = None
    token_ids: Extra[list[int]] = None


class ChatCompletionChunk(BaseModel):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Extra[Usage] = None
    prompt_token_ids: Extra[list[int]] = None
