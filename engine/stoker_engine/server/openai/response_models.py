"""What we answer, in OpenAI's words and, where those end, in vLLM's.

A field that OpenAI always sends is sent as null when empty; one of vLLM's extras is left out (`Extra`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.server.conversation import usage
from stoker_engine.server.fields.field_types import Extra
from stoker_engine.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs

#: Of a chat, which may end with calls of tools that wait for their answers.
ChatFinishReason = FinishReason | Literal["tool_calls"]


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those that a prefix hit saved."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of the generated tokens, those before the answer."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Extra[PromptTokensDetails] = None
    completion_tokens_details: Extra[CompletionTokensDetails] = None

    @classmethod
    def of(cls, counted: usage.Usage) -> Usage:
        """The same, in OpenAI's words."""
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
    """One completion: whole, or what an event adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: Extra[int | str] = None
    token_ids: Extra[list[int]] = None
    prompt_token_ids: Extra[list[int]] = None
    prompt_logprobs: Extra[PromptLogprobs] = None


class Completion(BaseModel):
    """The answer of /v1/completions; streamed, an event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Extra[Usage] = None


class CalledFunction(BaseModel):
    """What the assistant calls; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """What the assistant says: null where it only reasons or calls tools. Its reasoning goes by either name."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: Extra[str] = None
    reasoning_content: Extra[str] = None
    tool_calls: Extra[list[ToolCall]] = None


class FunctionDelta(BaseModel):
    """What an event adds to a called function."""

    name: Extra[str] = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What an event adds to a call."""

    index: int
    id: Extra[str] = None
    type: Extra[Literal["function"]] = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """What an event adds to a message."""

    role: Extra[Literal["assistant"]] = None
    content: Extra[str] = None
    reasoning: Extra[str] = None
    reasoning_content: Extra[str] = None
    tool_calls: Extra[list[ToolCallDelta]] = None


class ChatChoice(BaseModel):
    """One whole message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: Extra[int | str] = None
    token_ids: Extra[list[int]] = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Extra[list[int]] = None
    prompt_logprobs: Extra[PromptLogprobs] = None


class ChatChunkChoice(BaseModel):
    """What an event adds to one message."""

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
