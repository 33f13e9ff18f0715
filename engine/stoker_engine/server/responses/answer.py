"""Response bodies of the Responses API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from stoker_engine.server.conversation.usage import Usage
from stoker_engine.server.fields.logprobs import ContentLogprob
from stoker_engine.server.responses.items import Status


class OutputText(BaseModel):
    """Text of the assistant's message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[ContentLogprob] = []


class OutputMessage(BaseModel):
    """A message of the assistant."""

    id: str
    type: Literal["message"] = "message"
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoningText(BaseModel):
    """Text of the assistant's reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    """Reasoning, without a summary."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[None] = []
    content: list[OutputReasoningText]


class OutputFunctionCall(BaseModel):
    """A tool call; `arguments` is JSON, which may be cut off if the item is incomplete."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(BaseModel):
    """Numbers of prompt tokens found in the prefix cache, and written to it on request (unsupported, so always 0)."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(BaseModel):
    """Number of generated tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int) -> ResponseUsage:
        """Convert to this API's format."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens or 0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class ResponseError(BaseModel):
    """Why a response failed."""

    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] | None = "max_output_tokens"  # OpenAI has no value for a stop string


class Response(BaseModel):
    """Response of /v1/responses, with fields of the request; in an event, its state so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    model: str
    instructions: str | None
    previous_response_id: str | None
    store: bool
    background: Literal[False] = False
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    truncation: Literal["auto", "disabled"]
    service_tier: Literal["default"] = "default"
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class DeletedResponse(BaseModel):
    """Response of DELETE /v1/responses/ID."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """Response of GET /v1/responses/ID/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = Field(description="null if the list is empty")
    last_id: str | None
    has_more: bool
