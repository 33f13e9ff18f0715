"""Body of POST /v1/responses, and its conversion to a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, field_validator, model_validator

from stoker_common.errors import RequestError
from stoker_engine.server.conversation.generation import renamed
from stoker_engine.server.conversation.messages import Message, Text
from stoker_engine.server.conversation.request import ChatRequest, Conversation, template_variables
from stoker_engine.server.fields.field_types import (
    CacheSalt,
    Count,
    CountOrAll,
    Effort,
    Int64,
    LogitBias,
    Metadata,
    RequestId,
    Stop,
    StrictModel,
    TokenIds,
)
from stoker_engine.server.fields.structured_outputs import (
    StructuredOutputsFields,
    answer_format,
    format_names,
    is_option,
)
from stoker_engine.server.fields.unsupported import Absent, NoDict, NoList, Off, OnlyValue
from stoker_engine.server.parsers.tool_use import Tool
from stoker_engine.server.responses.items import Input, Item, MessageItem, TextPart, messages, of_type
from stoker_engine.server.responses.request_fields import (
    AllowedTools,
    FunctionTool,
    ReasoningConfig,
    StreamOptions,
    TextConfig,
    ToolChoice,
    requested_tool_use,
)

#: Fields with the same name in `SamplingParams`.
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
#: Field names in errors → this API's names.
FIELD_NAMES: Final = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "truncate_prompt_tokens": "truncation",
}
_LOGPROBS: Final = "message.output_text.logprobs"


class ResponsesRequest(StrictModel):
    """A conversation to answer, with OpenAI's fields and vLLM's."""

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

    # Accepted without effect.
    user: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: Count | None = None  # of tools that a server runs

    # Unsupported
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
            raise RequestError("stream_options requires stream: true", "stream_options")
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(f"top_logprobs requires include: [{_LOGPROBS!r}]", "top_logprobs")
        stated = self.structured_outputs.stated if self.structured_outputs else {}
        constraint_name = next((name for name in stated if not is_option(name)), None)
        if constraint_name and self.text and self.text.constraint:
            raise RequestError(
                f"text.format and structured_outputs.{constraint_name} both set the format; send only one of them",
                "structured_outputs",
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text comes with logprobs."""
        return _LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=[TextPart(type="input_text", text=self.input)])]
        return self.input

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest candidates per position, -1 for all; None if no logprobs are requested."""
        return (self.top_logprobs or 0) if self.wants_logprobs else None

    def to_request(self, history: Sequence[Item]) -> ChatRequest:
        """Return the API-independent request for `history` followed by this body's input.

        Raises:
            RequestError: a field is invalid or conflicts with another.
        """
        items = [*history, *self.items]
        instructions = [] if self.instructions is None else [Message("system", [Text(self.instructions)])]
        with renamed(FIELD_NAMES):
            self._check(turns := [*instructions, *messages(items)])
            tools = [Tool(each.name, each.description, each.parameters, bool(each.strict)) for each in self.tools or ()]
            effort = self.reasoning.effort if self.reasoning else None
            template_kwargs = template_variables(self.chat_template_kwargs, effort)
            of_format = self.text.constraint if self.text else {}
            structured_outputs = answer_format(of_format, self.structured_outputs)
            if self.include_reasoning is False and self.wants_logprobs:
                raise RequestError("logprobs would reveal the reasoning that include_reasoning hides", "logprobs")
            tool_use = requested_tool_use(tools, self.tool_choice, self.parallel_tool_calls)
        is_continued = _is_unfinished(items[-1])
        template_tools = tool_use.tools if isinstance(self.tool_choice, AllowedTools) else tools
        sampling = {name: getattr(self, name) for name in _SAMPLING}
        sampling["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        sampling["logprobs"] = self.num_logprobs
        return ChatRequest(
            Conversation(
                turns,
                template_tools,
                template_kwargs=template_kwargs,
                begins_message=not is_continued,
                continue_final_message=is_continued,
            ),
            self.model,
            tool_use,
            structured_outputs,
            self.include_reasoning is not False,
            max_tokens=self.max_output_tokens,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            sampling=sampling,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            field_names=FIELD_NAMES | (format_names("text.format") if of_format else {}),
        )

    def _check(self, turns: Sequence[Message]) -> None:
        for index, tool in enumerate(self.tools or ()):
            if not tool.name:
                raise _invalid(f"tools[{index}].name", "String should have at least 1 character")
        if not turns:
            raise _invalid("input", "List should have at least 1 item after validation, not 0")
        effort = self.reasoning.effort if self.reasoning else None
        if effort is not None and effort not in get_args(Effort):
            *others, last = map(repr, get_args(Effort))
            raise _invalid("reasoning.effort", f"Input should be {', '.join(others)} or {last}")


def _invalid(field: str, sentence: str) -> RequestError:
    return RequestError(f"{field}: {sentence}", field, "invalid_value")


def check_include(include: list[str]) -> list[str]:
    """Check the values of `include`.

    Raises:
        RequestError: a value is not supported.
    """
    for each in include:
        if each != _LOGPROBS:
            raise RequestError(f"include supports only {_LOGPROBS}; omit {each[:80]!r}", "include", "unsupported_value")
    return include


def _is_unfinished(last: Item) -> bool:
    """Return whether the last item is an unfinished message of the assistant, which is continued, as in vLLM."""
    return isinstance(last, MessageItem) and last.role == "assistant" and last.status in ("in_progress", "incomplete")
