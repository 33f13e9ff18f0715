"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from stoker_common.errors import RequestError
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.server.conversation.sampled_request import SampledRequest
from stoker_engine.server.schema.field_types import Count, CountOrAll, StrictModel
from stoker_engine.server.schema.messages import Message, Tool
from stoker_engine.server.schema.tool_choice import AllowedToolChoice, ToolChoice, ToolUse
from stoker_engine.server.schema.unsupported import UnsupportedChatFields

#: Variables of a chat template that have a field of their own.
_OWN_FIELDS = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
)


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatRendering(StrictModel):
    """How a conversation becomes a prompt."""

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
        for name in self.chat_template_kwargs or ():
            if name in _OWN_FIELDS:
                raise RequestError(f"{name} has a field of its own", "chat_template_kwargs")
        return self

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template."""
        return dict(self.chat_template_kwargs or {})

    @property
    def begins_message(self) -> bool:
        """Whether the answer is a message of its own, and not the rest of the last one."""
        generate = self.add_generation_prompt
        return not self.continue_final_message if generate is None else generate


class ChatCompletionRequest(UnsupportedChatFields, SampledRequest, ChatRendering):
    """A conversation to continue with, in OpenAI's words and vLLM's."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: CountOrAll | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    _tool_use: ToolUse = PrivateAttr()

    @model_validator(mode="after")
    def _agrees(self) -> ChatCompletionRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError("max_tokens is the old name of max_completion_tokens; give one of them", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.include_reasoning is False:
            for name in ("logprobs", "return_token_ids"):
                if getattr(self, name):
                    raise RequestError(f"{name} would show the reasoning that include_reasoning hides", name)
        self._tool_use = ToolUse.of(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self._tool_use.is_forced:
            if self.use_beam_search:
                raise RequestError(
                    "tool_choice forces calls by a grammar, which beam search does not follow", "tool_choice"
                )
            if self.allowed_token_ids is not None:
                raise RequestError(
                    "tool_choice forces calls by a grammar, which allowed_token_ids may leave no token; "
                    "send one of them",
                    "tool_choice",
                )
        return self

    @property
    def template_tools(self) -> Sequence[Tool]:
        """The tools that the model is told, also where it is to call none of them, or a certain one."""
        return self._tool_use.tools if isinstance(self.tool_choice, AllowedToolChoice) else self.tools or ()

    @property
    def tool_use(self) -> ToolUse:
        """Which tools the answer may call, and whether it must."""
        return self._tool_use

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template. `reasoning_effort` is one, and turns thinking on or off, as in vLLM; a
        template that knows neither goes on as it is."""
        variables = super().template_kwargs
        if self.reasoning_effort is not None:
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
            variables["reasoning_effort"] = self.reasoning_effort
        return variables

    @property
    def logprobs_neutral_for_beams(self) -> Mapping[str, Sequence[Any]]:
        """Beams have no logprobs of their tokens."""
        return {"logprobs": (False,)}

    @property
    def field_names(self) -> dict[str, str]:
        """What this body calls the engine's `prompt`, `max_tokens` and `logprobs`."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "max_tokens": limit, "logprobs": "top_logprobs", **self.format_names}

    @property
    def num_logprobs(self) -> int | None:
        """How many logprobs each position gets, if any."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many each position of the prompt gets, if any: what `echo` repeats has logprobs like the rest."""
        if self.prompt_logprobs is None and self.echo and not self.stream:
            return self.num_logprobs
        return self.prompt_logprobs

    @property
    def echoed(self) -> str:
        """What the answer begins with by `echo`: the text of the last message, where its role is the answer's."""
        last = self.messages[-1]
        return last.text if self.echo and (last.role == "assistant" or not self.begins_message) else ""

    def params_for(self, defaults: Mapping[str, Any], room: int) -> RequestParams:
        """How to answer a prompt that leaves room for `room` tokens.

        The length that the model's makers recommend bends to that room; one that was asked for does not.
        """
        max_tokens = self.max_completion_tokens or self.max_tokens
        if max_tokens is None and defaults.get("max_tokens"):
            max_tokens = max(1, min(defaults["max_tokens"], room))
        return self.params(defaults, max_tokens, self.num_logprobs, self.num_prompt_logprobs)
