"""The bodies of /v1/messages and /v1/messages/count_tokens, and the chat requests that they become.

https://docs.anthropic.com/en/api/messages. As everywhere, what asks for nothing is accepted, and what asks for
something that is not there is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from stoker_common.errors import RequestError
from stoker_engine.server.anthropic.blocks import CacheHint, MessageParam, Text, ToolUseBlockParam, chat_messages
from stoker_engine.server.conversation.chat_request import ChatCompletionRequest
from stoker_engine.server.errors.anthropic import NO_THREADS
from stoker_engine.server.schema.field_types import (
    MAX_METADATA,
    MAX_STOPS,
    CacheSalt,
    Count,
    CountOrAll,
    StrictModel,
    at_most,
)
from stoker_engine.server.schema.unsupported import Absent, NoDict, NoList, Off, OnlyValue

#: What this API calls the fields of a chat request, for errors.
FIELD_NAMES: Final[Mapping[str, str]] = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structured_outputs.json": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice",
}
#: Least `thinking.budget_tokens`; Anthropic's rule.
_LEAST_BUDGET: Final = 1024


def _is_custom(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        context = {"kind": kind[:50]}
        sentence = "{kind} is a tool of Anthropic's own; here there are only those that a request describes"
        raise PydanticCustomError("unsupported", sentence, context)
    return value


class ToolParam(StrictModel):
    """A tool that the model may use; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheHint = None
    # How soon the input is streamed is not for the client to say here: it comes when it can no longer change.
    eager_input_streaming: bool | None = None
    defer_loading: Off = None
    input_examples: NoList = None
    allowed_callers: Annotated[Any, OnlyValue(["direct"], [])] = None

    @model_validator(mode="after")
    def _takes_objects(self) -> ToolParam:
        if self.input_schema.get("type", "object") != "object":
            raise PydanticCustomError("shape", 'the input of a tool is an object: input_schema.type must be "object"')
        return self

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", **self.input_schema},
            "strict": self.strict,
        }
        stated = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": stated}


class ToolChoiceParam(StrictModel):
    """Whether the model must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoiceParam:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("shape", 'name belongs to the type "tool", which needs it')
        return self

    def for_chat(self) -> Any:
        """The choice as a chat has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class ThinkingConfig(StrictModel):
    """Whether the model thinks before it answers.

    The budget is a hint: `max_tokens` bounds what is thought and what is answered, together.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_a_budget(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise PydanticCustomError("shape", 'budget_tokens belongs to the type "enabled", which needs it')
        if self.budget_tokens is not None and self.budget_tokens < _LEAST_BUDGET:
            raise PydanticCustomError("shape", "budget_tokens must be at least {least}", {"least": _LEAST_BUDGET})
        return self


class JSONOutputFormat(StrictModel):
    """The answer is JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """What the answer is like, and how much goes into it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JSONOutputFormat | None = None
    task_budget: Absent = None


def _keeps_all(value: Any) -> Any:
    """What coding agents always send keeps all that was thought, which asks for nothing."""
    edits = value.get("edits", []) if isinstance(value, dict) and value.keys() <= {"edits"} else value
    keep_all = {"type": "clear_thinking_20251015", "keep": "all"}
    if edits is not None and not (isinstance(edits, list) and all(edit == keep_all for edit in edits)):
        sentence = "this server does not edit conversations; leave it out, or have it keep all thinking"
        raise PydanticCustomError("unsupported", "{sentence}", {"sentence": sentence})
    return value


def _no_thread(value: Any) -> None:
    """Clients that would rather send less send the whole conversation once they are told by this code."""
    if value is not None:
        raise RequestError("this server holds no conversations; send it whole, without thread", "thread", NO_THREADS)


class Conversation(StrictModel):
    """What both bodies have: all that becomes the prompt."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    system: Text | None = None
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
    def _agrees(self) -> Conversation:
        names = Counter(tool.name for tool in self.tools or ())
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise RequestError(f"two tools are called {twice}; their names must be unique", "tools")
        if self.tool_choice is not None and self.tool_choice.type != "none":
            if not names:
                raise RequestError("tool_choice needs tools", "tool_choice")
            if self.tool_choice.type == "tool" and self.tool_choice.name not in names:
                raise RequestError("tool_choice.name is none of the tools", "tool_choice")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise RequestError("output_format is the old name of output_config.format; give one", "output_format")
        self._check_final()
        return self

    def _check_final(self) -> None:
        """What a final message of the assistant says is continued."""
        if not self.is_continued:
            return
        if any(isinstance(block, ToolUseBlockParam) for block in self.messages[-1].blocks):
            raise RequestError("the last message calls a tool; the tool_result must follow", "messages")
        if self.thinking is not None and self.thinking.type == "enabled":
            raise RequestError(
                "the last message is the assistant's and is continued, so that there is no time to think; "
                "leave thinking out, or end with a message of the user",
                "thinking",
            )

    @property
    def is_continued(self) -> bool:
        """Whether the answer continues with what the assistant has started to say."""
        return self.messages[-1].role == "assistant"

    @property
    def has_later_system(self) -> bool:
        """Whether there are instructions between the messages."""
        return any(message.role == "system" for message in self.messages)

    def to_chat(self, *, system_anywhere: bool) -> ChatCompletionRequest:
        """The same as a chat request.

        Args:
            system_anywhere: whether the chat template takes system messages anywhere.

        Raises:
            RequestError: no chat can be like that.
        """
        stated = {name: value for name, value in self._chat_fields(system_anywhere).items() if value is not None}
        try:
            return ChatCompletionRequest.model_validate(stated)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "messages"
            raise RequestError(first["msg"], FIELD_NAMES.get(name, name)) from None

    def _chat_fields(self, system_anywhere: bool) -> dict[str, Any]:
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        variables: dict[str, Any] = {}
        if self.thinking is not None:  # the names by which chat templates know it
            variables |= dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled")
        output = config.format or self.output_format
        return {
            "model": self.model,
            "messages": chat_messages(self.system or (), self.messages, system_anywhere=system_anywhere),
            "tools": [tool.for_chat() for tool in self.tools] if self.tools else None,
            "tool_choice": None if choice is None else choice.for_chat(),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": {**variables, **(self.chat_template_kwargs or {})} or None,
            "reasoning_effort": config.effort,
            "continue_final_message": self.is_continued or None,
            "response_format": None if output is None else _response_format(output),
        }


class MessagesRequest(Conversation):
    """A conversation to continue with, in Anthropic's words and a few of vLLM's."""

    max_tokens: Count
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: CountOrAll | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    cache_salt: CacheSalt | None = None  # vLLM's

    # These label a request, or ask for what there is anyway.
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

    def _chat_fields(self, system_anywhere: bool) -> dict[str, Any]:
        return {
            **super()._chat_fields(system_anywhere),
            "max_completion_tokens": self.max_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "cache_salt": self.cache_salt,
        }


class CountTokensRequest(Conversation):
    """A conversation whose tokens are counted."""


def _response_format(output: JSONOutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output.json_schema, "strict": True}}
