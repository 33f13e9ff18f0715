"""Body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from stoker_common.errors import RequestError
from stoker_engine.server.conversation.request import ChatRequest, Conversation, template_variables
from stoker_engine.server.fields.field_types import Count, CountOrAll, Effort, StrictModel
from stoker_engine.server.openai.messages import Message, Tool
from stoker_engine.server.openai.sampled_request import SampledRequest
from stoker_engine.server.openai.tool_choice import AllowedToolChoice, ToolChoice, requested_tool_use
from stoker_engine.server.openai.unsupported import UnsupportedChatFields
from stoker_engine.server.parsers.tool_use import Tool as PlainTool
from stoker_engine.server.parsers.tool_use import ToolUse

Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatRendering(StrictModel):
    """Fields that determine how a conversation becomes a prompt."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _ends_one_way(self) -> ChatRendering:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )
        _ = self.template_kwargs
        return self

    def conversation(self, messages: Sequence[Message], add_special_tokens: bool | None) -> Conversation:
        """Return a conversation with `messages`."""
        return Conversation(
            [message.to_message() for message in messages],
            self.template_tools,
            self.documents,
            self.chat_template,
            self.template_kwargs,
            self.begins_message,
            bool(self.continue_final_message),
            bool(add_special_tokens),
        )

    @property
    def template_tools(self) -> Sequence[PlainTool]:
        """The tools in the prompt."""
        return [tool.to_tool() for tool in self.tools or ()]

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template.

        Raises:
            RequestError: a variable is reserved.
        """
        return template_variables(self.chat_template_kwargs)

    @property
    def begins_message(self) -> bool:
        """Whether the prompt ends with the generation prompt, so that the answer is a new message."""
        generate = self.add_generation_prompt
        return not self.continue_final_message if generate is None else generate


class ChatCompletionRequest(UnsupportedChatFields, SampledRequest, ChatRendering):
    """A conversation to answer, with OpenAI's and vLLM's fields."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: CountOrAll | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    _tool_use: ToolUse = PrivateAttr()

    @model_validator(mode="after")
    def _agrees(self) -> ChatCompletionRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError("max_tokens is the old name of max_completion_tokens; send only one", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs: true", "top_logprobs")
        if self.include_reasoning is False:
            for name in ("logprobs", "return_token_ids"):
                if getattr(self, name):
                    raise RequestError(f"{name} would reveal the reasoning that include_reasoning: false hides", name)
        self._tool_use = requested_tool_use(super().template_tools, self.tool_choice, self.parallel_tool_calls)
        if self._tool_use.is_forced:
            if self.use_beam_search:
                raise RequestError(
                    "tool_choice forces a call by a grammar, which beam search does not support", "tool_choice"
                )
            if self.allowed_token_ids is not None:
                raise RequestError(
                    "tool_choice forces a call by a grammar, and allowed_token_ids may exclude every token that the "
                    "grammar allows; send only one of them",
                    "tool_choice",
                )
        return self

    @property
    def template_tools(self) -> Sequence[PlainTool]:
        """The tools in the prompt: the allowed ones if `tool_choice` is "allowed_tools", else all."""
        return self._tool_use.tools if isinstance(self.tool_choice, AllowedToolChoice) else super().template_tools

    @property
    def tool_use(self) -> ToolUse:
        """Which tools the answer may call, and whether it must call one."""
        return self._tool_use

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template, including the reasoning effort."""
        return template_variables(self.chat_template_kwargs, self.reasoning_effort)

    @property
    def logprobs_neutral_for_beams(self) -> Mapping[str, Sequence[Any]]:
        """`logprobs` and its neutral values; beam search returns no logprobs of tokens."""
        return {"logprobs": (False,)}

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest candidates per position; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Like `num_logprobs`, for the prompt. With `echo` the default is `num_logprobs`, except in streams."""
        if self.prompt_logprobs is None and self.echo and not self.stream:
            return self.num_logprobs
        return self.prompt_logprobs

    @property
    def echoed(self) -> str:
        """The last message's text, if `echo` puts it before the answer; empty otherwise."""
        last = self.messages[-1]
        return last.text if self.echo and (last.role == "assistant" or not self.begins_message) else ""

    def to_request(self) -> ChatRequest:
        """Return the API-independent request."""
        sampling = self.sampling(self.num_logprobs, self.num_prompt_logprobs)
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return ChatRequest(
            self.conversation(self.messages, self.add_special_tokens),
            self.model,
            self._tool_use,
            self.requested_format,
            self.include_reasoning is not False,
            self.num_sequences,
            self.max_completion_tokens or self.max_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            sampling=sampling,
            beam_search=self.beam_search,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            stream_interval=self.stream_interval or 1,
            field_names={"prompt": "messages", "max_tokens": limit, "logprobs": "top_logprobs", **self.format_names},
        )
