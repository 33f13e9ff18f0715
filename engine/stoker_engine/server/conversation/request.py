"""A request to continue a conversation, whatever API it came by: each makes one of its body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from stoker_common.errors import RequestError
from stoker_engine.core.sampling_defaults import sampling_params
from stoker_engine.core.sampling_params import BeamSearchParams, RequestParams
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.conversation.messages import Message
from stoker_engine.server.parsers.tool_use import Tool, ToolUse

#: Variables of a chat template that a client cannot set as such.
_OWN_FIELDS: Final = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
)


@dataclass(frozen=True)
class Conversation:
    """What becomes the prompt.

    Attributes:
        tools: those in the prompt, also where the model may call none of them, or must call a certain one.
        documents: what it may cite.
        chat_template: of the request itself.
        template_kwargs: variables for the chat template; see `template_variables`.
        begins_message: whether the answer is a message of its own.
        continue_final_message: whether it is the rest of the last one.
        add_special_tokens: add those that the tokenizer adds to a text; most templates write their own.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    begins_message: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """How to continue a conversation.

    Attributes:
        model: the name by which the client asks for the model, if it does.
        tool_use: which tools the answer may call, and whether it must.
        answer_format: what the answer must look like.
        include_reasoning: whether the reasoning is part of the answer.
        n: choices; `sampling` has it too, where the client states it.
        max_tokens: most tokens of a choice; None: what the model's makers recommend, as far as the prompt leaves room
            for it, or else all that room.
        shortens: whether `max_tokens`, too, is as much as the prompt leaves room for, where that is less.
        truncate_prompt_tokens: keep only so many tokens of the prompt (-1: as many as the model takes).
        truncation_side: where it is cut.
        sampling: further fields of `SamplingParams` by name; None: what the model's makers recommend.
        beam_search: fields of `BeamSearchParams`, instead of `sampling`.
        priority, cache_salt: see `EngineClient.add_request`.
        field_names: what the client calls the fields that errors name (`prompt`, and those of `SamplingParams` and of
            requests), where that is something else.
    """

    conversation: Conversation
    model: str | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    answer_format: StructuredOutputs | None = None
    include_reasoning: bool = True
    n: int = 1
    max_tokens: int | None = None
    shortens: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    beam_search: Mapping[str, Any] | None = None
    priority: int = 0
    cache_salt: str = ""
    field_names: Mapping[str, str] = field(default_factory=dict)

    def params(self, defaults: Mapping[str, Any], room: int) -> RequestParams:
        """How to answer a prompt that leaves room for `room` tokens.

        Args:
            defaults: what the model's makers recommend; beam search has no use for it.

        Raises:
            RequestError: a value is out of range.
        """
        max_tokens = self.max_tokens
        if max_tokens is None and defaults.get("max_tokens"):
            max_tokens = max(1, min(defaults["max_tokens"], room))
        elif max_tokens is not None and self.shortens:
            max_tokens = min(max_tokens, room)
        return request_params(defaults, max_tokens, self.answer_format, self.sampling, self.beam_search)


def request_params(
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    answer_format: StructuredOutputs | None,
    sampling: Mapping[str, Any],
    beam_search: Mapping[str, Any] | None,
) -> RequestParams:
    """How to generate, with at most `max_tokens` tokens (None: to the end of the context); see `ChatRequest`.

    Raises:
        RequestError: a value is out of range.
    """
    if beam_search is not None:
        return BeamSearchParams(max_tokens=max_tokens, **beam_search)
    own = {"max_tokens": max_tokens, "structured_outputs": answer_format}
    return sampling_params({**sampling, **own}, defaults)


def template_variables(stated: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Variables for a chat template.

    Args:
        stated: by the client.
        effort: of reasoning. It is a variable, and turns thinking on or off, as in vLLM; a template that knows neither
            goes on as it is.

    Raises:
        RequestError: a variable has a field of its own.
    """
    for name in stated or ():
        if name in _OWN_FIELDS:
            raise RequestError(f"{name} has a field of its own", "chat_template_kwargs")
    variables = dict(stated or {})
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    return variables
