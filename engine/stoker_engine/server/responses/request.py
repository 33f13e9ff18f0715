"""The body of POST /v1/responses, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError, field_validator, model_validator

from stoker_common.errors import RequestError
from stoker_engine.server.conversation.chat_request import ChatCompletionRequest
from stoker_engine.server.conversation.generation import renamed
from stoker_engine.server.conversation.structured_outputs import StructuredOutputsFields, is_option
from stoker_engine.server.responses.items import Input, Item, MessageItem, TextPart, messages, of_type
from stoker_engine.server.responses.request_fields import (
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    JSONObjectFormat,
    JSONSchemaFormat,
    ReasoningConfig,
    StreamOptions,
    TextConfig,
    TextFormat,
    ToolChoice,
)
from stoker_engine.server.schema.field_types import (
    CacheSalt,
    Count,
    CountOrAll,
    Int64,
    LogitBias,
    Metadata,
    RequestId,
    Stop,
    StrictModel,
    TokenIds,
)
from stoker_engine.server.schema.unsupported import Absent, NoDict, NoList, Off, OnlyValue

#: What a chat calls by the same name.
_SAME: Final = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "include_reasoning",
    "structured_outputs",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
)
#: What the fields of a chat are called here, where errors name them.
FIELD_NAMES: Final = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}
_LOGPROBS: Final = "message.output_text.logprobs"


class ResponsesRequest(StrictModel):
    """What to answer, in OpenAI's words and vLLM's."""

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None

    max_output_tokens: Count | None = None
    truncation: Literal["auto", "disabled"] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: CountOrAll | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: (
        Annotated[list[Annotated[FunctionTool, of_type("tools", {"function": FunctionTool})]], Field(fail_fast=True)]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # vLLM's
    top_k: CountOrAll | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    include_reasoning: bool | None = None
    structured_outputs: StructuredOutputsFields | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None

    # These label a request for whoever keeps accounts or logs, or limit what we have none of; they ask nothing of us.
    user: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: Count | None = None  # of tools that a server runs

    # What we do not do
    background: Off = None
    background_options: Absent = None
    access_programs: Absent = None
    context_management: NoList = None
    conversation: Absent = None
    image: Absent = None
    moderation: Absent = None
    prompt: Absent = None
    prompt_cache_options: Annotated[Any, OnlyValue({"mode": "implicit"})] = None
    service_tier: Annotated[Any, OnlyValue("auto", "default")] = None
    enable_response_messages: Off = None
    previous_input_messages: Absent = None
    ec_transfer_params: Absent = None
    kv_transfer_params: Absent = None
    media_io_kwargs: NoDict = None
    mm_payload: Annotated[Any, OnlyValue("tensors")] = None
    mm_processor_kwargs: NoDict = None
    return_mm_kwargs: Annotated[Any, OnlyValue(True)] = None
    session_id: Absent = None
    vllm_xargs: NoDict = None
    watermarking: Off = None

    @field_validator("include", mode="after")
    @classmethod
    def _is_there(cls, include: list[str] | None) -> list[str] | None:
        return None if include is None else check_include(include)

    @model_validator(mode="after")
    def _agrees(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(f"top_logprobs needs include: [{_LOGPROBS!r}]", "top_logprobs")
        stated = self.structured_outputs.stated if self.structured_outputs else {}
        constraint_name = next((name for name in stated if not is_option(name)), None)
        if constraint_name and self.text and self.text.format and self.text.format.type != "text":
            raise RequestError(
                f"text.format and structured_outputs.{constraint_name} both say what to write; send one of them",
                "structured_outputs",
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text comes with log-probabilities."""
        return _LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=[TextPart(type="input_text", text=self.input)])]
        return self.input

    def chat(self, history: Sequence[Item]) -> ChatCompletionRequest:
        """The chat of `history` and what this body adds.

        Raises:
            RequestError: a chat cannot have this.
            RequestValidationError: for the same reason.
        """
        items = [*history, *self.items]
        fields = {name: getattr(self, name) for name in _SAME} | {
            "messages": [*self._instructions(), *messages(items)],
            "max_completion_tokens": self.max_output_tokens,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "continue_final_message": _is_unfinished(items[-1]) or None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _response_format(self.text.format)
        if self.tools:
            names = {"name", "description", "parameters", "strict"}
            functions = [tool.model_dump(include=names, exclude_none=True) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        if self.tool_choice is not None:
            fields["tool_choice"] = _choice(self.tool_choice)
        try:
            with renamed(FIELD_NAMES):
                return ChatCompletionRequest.model_validate(fields)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            raise RequestValidationError([{**each, "loc": _field_location(each["loc"])} for each in errors]) from error

    def _instructions(self) -> list[dict[str, Any]]:
        return [] if self.instructions is None else [{"role": "system", "content": self.instructions}]


def error_names(chat: ChatCompletionRequest) -> dict[str, str]:
    """What the body that became `chat` calls the fields that errors name."""
    return FIELD_NAMES | {name: FIELD_NAMES.get(field, field) for name, field in chat.field_names.items()}


def check_include(include: list[str]) -> list[str]:
    """Refuses what cannot be included in an answer.

    Raises:
        RequestError: it asks for something else than log-probabilities.
    """
    for each in include:
        if each != _LOGPROBS:
            raise RequestError(
                f"this server can include only {_LOGPROBS}; leave {each[:80]!r} out", "include", "unsupported_value"
            )
    return include


def _is_unfinished(last: Item) -> bool:
    """Whether the conversation ends within what the assistant says, which is continued then. vLLM's rule."""
    return isinstance(last, MessageItem) and last.role == "assistant" and last.status in ("in_progress", "incomplete")


def _choice(choice: str | FunctionChoice | AllowedTools) -> Any:
    match choice:
        case FunctionChoice():
            return {"type": "function", "function": {"name": choice.name}}
        case AllowedTools():
            allowed = {"mode": choice.mode, "tools": [_choice(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _response_format(text_format: TextFormat | JSONObjectFormat | JSONSchemaFormat) -> dict[str, Any]:
    if not isinstance(text_format, JSONSchemaFormat):
        return {"type": text_format.type}
    names = {"name", "description", "schema_", "strict"}
    schema = text_format.model_dump(include=names, exclude_none=True, by_alias=True)
    return {"type": "json_schema", "json_schema": {"name": "response", **schema}}


def _field_location(where: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where a field of a chat is in this body; what the items of a conversation became is not looked up again.

    Tools and formats have their fields one object less deep here.
    """
    first, *rest = where
    inner = {"tools": "function", "tool_choice": "function", "response_format": "json_schema"}.get(str(first))
    if inner in rest:
        rest.remove(inner)
    name = FIELD_NAMES.get(str(first), first)
    return ("body", *str(name).split("."), *(() if name == "input" else rest))
