"""Bodies of /v1/messages and /v1/messages/count_tokens, and their conversion to requests.

https://docs.anthropic.com/en/api/messages. Unsupported fields are accepted only with neutral values;
see `fields.unsupported`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from stoker_common.errors import RequestError
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.anthropic.blocks import CacheHint, MessageParam, TextParam, ToolUseBlockParam, plain_messages
from stoker_engine.server.conversation.request import ChatRequest, Conversation, template_variables
from stoker_engine.server.errors.anthropic import NO_THREADS
from stoker_engine.server.fields.field_types import (
    MAX_METADATA,
    MAX_STOPS,
    CacheSalt,
    Count,
    CountOrAll,
    StrictModel,
    at_most,
)
from stoker_engine.server.fields.unsupported import Absent, NoDict, NoList, Off, OnlyValue
from stoker_engine.server.parsers.tool_use import Tool, ToolMode, ToolUse

#: Field names in errors → this API's names.
_FIELD_NAMES: Final[Mapping[str, str]] = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "structured_outputs.json": "output_config.format",
    "continue_final_message": "messages",
}
#: Minimum of `thinking.budget_tokens`; Anthropic's rule.
_LEAST_BUDGET: Final = 1024


def _is_custom(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        context = {"kind": kind[:50]}
        sentence = "tools of type {kind} are not supported, only custom tools"
        raise PydanticCustomError("unsupported", sentence, context)
    return value


class ToolParam(StrictModel):
    """A tool that the model may use; `input_schema` is a JSON Schema."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheHint = None
    # Ignored: the input is always streamed as soon as it is final.
    eager_input_streaming: bool | None = None
    defer_loading: Off = None
    input_examples: NoList = None
    allowed_callers: Annotated[Any, OnlyValue(["direct"], [])] = None

    @model_validator(mode="after")
    def _takes_objects(self) -> ToolParam:
        if self.input_schema.get("type", "object") != "object":
            raise PydanticCustomError("shape", 'input_schema.type must be "object"')
        return self

    def to_tool(self) -> Tool:
        """Return the tool as part of a `Conversation`."""
        return Tool(self.name, self.description, {"type": "object", **self.input_schema}, bool(self.strict))


class ToolChoiceParam(StrictModel):
    """Whether the model may or must call tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoiceParam:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("shape", 'name is required with type "tool", and allowed only with it')
        return self

    def use_of(self, tools: Sequence[Tool]) -> ToolUse:
        """Return the tool use of an answer to a request with `tools`."""
        modes: dict[str, ToolMode] = {"any": "required", "tool": "named", "none": "none"}
        names = None if self.name is None else [self.name]
        return ToolUse.of(tools, modes.get(self.type, "auto"), names, not self.disable_parallel_tool_use)


class ThinkingConfig(StrictModel):
    """Whether the model should reason before it answers.

    The budget is checked and otherwise ignored: `max_tokens` limits reasoning and answer together.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_a_budget(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise PydanticCustomError("shape", 'budget_tokens is required with type "enabled", and only allowed there')
        if self.budget_tokens is not None and self.budget_tokens < _LEAST_BUDGET:
            raise PydanticCustomError("shape", "budget_tokens must be at least {least}", {"least": _LEAST_BUDGET})
        return self


class JSONOutputFormat(StrictModel):
    """JSON that conforms to a schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """Format of the answer, and reasoning effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JSONOutputFormat | None = None
    task_budget: Absent = None


def _keeps_all(value: Any) -> Any:
    """Refuse all edits except those that keep all thinking, which coding agents send and which have no effect."""
    edits = value.get("edits", []) if isinstance(value, dict) and value.keys() <= {"edits"} else value
    keep_all = {"type": "clear_thinking_20251015", "keep": "all"}
    if edits is not None and not (isinstance(edits, list) and all(edit == keep_all for edit in edits)):
        sentence = "editing conversations is not supported; omit it, or keep all thinking"
        raise PydanticCustomError("unsupported", "{sentence}", {"sentence": sentence})
    return value


def _no_thread(value: Any) -> None:
    """Refuse threads with an error code on which clients switch to sending the whole conversation."""
    if value is not None:
        raise RequestError("conversations are not stored; send them whole, without thread", "thread", NO_THREADS)


class ConversationBody(StrictModel):
    """The fields that the bodies of both endpoints share, including all that determine the prompt."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    system: TextParam | None = None
    tools: Annotated[list[Annotated[ToolParam, BeforeValidator(_is_custom)]], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JSONOutputFormat | None = None  # the older name of output_config.format
    cache_control: CacheHint = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    context_management: Annotated[Any, BeforeValidator(_keeps_all)] = None
    mcp_servers: NoList = None
    thread: Annotated[Any, BeforeValidator(_no_thread)] = None
    speed: Annotated[Any, OnlyValue("standard")] = None

    @model_validator(mode="after")
    def _agrees(self) -> ConversationBody:
        names = Counter(tool.name for tool in self.tools or ())
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise RequestError(f"tools contains {twice} more than once; names must be unique", "tools")
        if self.tool_choice is not None and self.tool_choice.type != "none":
            if not names:
                raise RequestError("tool_choice requires tools", "tool_choice")
            if self.tool_choice.type == "tool" and self.tool_choice.name not in names:
                raise RequestError("tool_choice.name is not in tools", "tool_choice")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise RequestError("output_format is the old name of output_config.format; send only one", "output_format")
        self._check_final()
        return self

    def _check_final(self) -> None:
        """Check the last message if it is the assistant's: the answer continues it."""
        if not self.is_continued:
            return
        if any(isinstance(block, ToolUseBlockParam) for block in self.messages[-1].blocks):
            raise RequestError("the last message calls a tool; a tool_result must follow it", "messages")
        if self.thinking is not None and self.thinking.type == "enabled":
            raise RequestError(
                "the last message is the assistant's, and the answer continues it without thinking; "
                "omit thinking, or end with a user message",
                "thinking",
            )

    @property
    def is_continued(self) -> bool:
        """Whether the answer continues the assistant's last message."""
        return self.messages[-1].role == "assistant"

    @property
    def has_later_system(self) -> bool:
        """Whether `messages` contains system messages."""
        return any(message.role == "system" for message in self.messages)

    def to_request(self, *, system_anywhere: bool) -> ChatRequest:
        """Return the API-independent request.

        Args:
            system_anywhere: whether the chat template accepts system messages anywhere.

        Raises:
            RequestError: the request is invalid.
        """
        messages = plain_messages(self.system or (), self.messages, system_anywhere=system_anywhere)
        if not messages:
            raise RequestError("List should have at least 1 item after validation, not 0", "messages")
        tools = [tool.to_tool() for tool in self.tools or ()]
        config = self.output_config or OutputConfig()
        thinking: dict[str, Any] = {}
        if self.thinking is not None:  # chat templates use either name
            thinking = dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled")
        output = config.format or self.output_format
        conversation = Conversation(
            messages,
            tools,
            template_kwargs=template_variables({**thinking, **(self.chat_template_kwargs or {})}, config.effort),
            begins_message=not self.is_continued,
            continue_final_message=self.is_continued,
        )
        return ChatRequest(
            conversation,
            self.model,
            ToolUse.of(tools) if self.tool_choice is None else self.tool_choice.use_of(tools),
            None if output is None else StructuredOutputs(json=output.json_schema),
            field_names=_FIELD_NAMES,
        )


class MessagesRequest(ConversationBody):
    """A conversation to answer, with Anthropic's fields and a few of vLLM's."""

    max_tokens: Count
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: CountOrAll | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    cache_salt: CacheSalt | None = None  # vLLM's

    # Labels, and options whose accepted values change nothing.
    metadata: Annotated[dict[str, Any], at_most(MAX_METADATA)] | None = None
    service_tier: Annotated[Any, OnlyValue("auto", "standard_only")] = None

    # Anthropic's
    billing_policy: Absent = None
    compaction: Absent = None
    container: Absent = None
    diagnostics: Absent = None
    fallback_credit_token: Absent = None
    fallbacks: NoList = None
    inference_geo: Absent = None

    # vLLM's
    ec_transfer_params: Absent = None
    kv_transfer_params: Absent = None
    vllm_xargs: NoDict = None
    watermarking: Off = None

    @model_validator(mode="after")
    def _leaves_room(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise RequestError("thinking.budget_tokens must be less than max_tokens", "thinking")
        return self

    def to_request(self, *, system_anywhere: bool) -> ChatRequest:
        """Return the API-independent request."""
        return replace(
            super().to_request(system_anywhere=system_anywhere),
            max_tokens=self.max_tokens,
            shortens=True,
            sampling={
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "stop": self.stop_sequences,
            },
            cache_salt=self.cache_salt or "",
        )


class CountTokensRequest(ConversationBody):
    """A conversation whose tokens are to be counted."""
