"""What we answer, in OpenAI's words and, where those end, in vLLM's.

A field that OpenAI always sends is sent as null when empty; one of vLLM's extras is left out (`Extra`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.server.schema.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs

T = TypeVar("T")


def _is_none(value: Any) -> bool:
    return value is None


Extra = Annotated[T | None, Field(exclude_if=_is_none)]

#: Of a chat, which may end with calls of tools that wait for their answers.
ChatFinishReason = FinishReason | Literal["tool_calls"]


class ErrorInfo(BaseModel):
    """What went wrong, for a person (`message`) and for a program (the rest)."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every status from 400 on, and the last event of a stream that fails."""

    error: ErrorInfo


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


class ModelCard(BaseModel):
    """One name that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stoker"
    root: str
    parent: None = None
    max_model_len: int
    dtype: Extra[str] = None
    quantization: Extra[str] = None
    weights: Extra[str] = None
    kv_cache_dtype: Extra[str] = None
    license: Extra[str] = None
    model_card: Extra[str] = None


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class ServerLoad(BaseModel):
    """The answer of /load: requests that are being generated for."""

    server_load: int


class Version(BaseModel):
    """The answer of /version."""

    version: str
