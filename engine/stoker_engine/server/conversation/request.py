"""API-independent request to continue a conversation."""

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

#: Variables of a chat template that clients must not set.
_OWN_FIELDS: Final = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
)


@dataclass(frozen=True)
class Conversation:
    """The contents of the prompt.

    Attributes:
        tools: tools in the prompt, whether or not the answer may call them.
        documents: documents that the answer may cite.
        chat_template: template of the request itself; None: the server's.
        template_kwargs: variables for the chat template; see `template_variables`.
        begins_message: whether the prompt ends with the generation prompt, so that the answer is a new message.
        continue_final_message: whether the answer continues the last message.
        add_special_tokens: whether the tokenizer adds its special tokens; most templates contain them.
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
    """A request to continue a conversation.

    Attributes:
        model: requested model name, if any.
        tool_use: which tools the answer may call, and whether it must call one.
        n: number of choices; `sampling` contains it too, if the client sets it.
        max_tokens: maximum number of tokens per choice; None for the model's recommended maximum, limited by the
            context, or else the rest of the context.
        shortens: whether `max_tokens` is reduced to the rest of the context; else larger values are refused.
        truncate_prompt_tokens: number of prompt tokens to keep (-1: as many as the context allows; None: all).
        sampling: other fields of `SamplingParams` by name; None for the model's recommended value.
        beam_search: fields of `BeamSearchParams`, instead of `sampling`.
        priority, cache_salt: see `EngineClient.add_request`.
        stream_interval: least number of tokens of the choices' events; the server's is used if it is larger.
        field_names: field names in errors (`prompt`, and those of `SamplingParams` and of requests) → the client's
            names.
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
    stream_interval: int = 1
    field_names: Mapping[str, str] = field(default_factory=dict)

    def params(self, defaults: Mapping[str, Any], room: int) -> RequestParams:
        """Return the parameters for a prompt that leaves `room` tokens of the context.

        Args:
            defaults: the model's recommended values; beam search uses only `max_tokens` of them.

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
    """Return parameters for at most `max_tokens` tokens (None: the rest of the context); see `ChatRequest`.

    Raises:
        RequestError: a value is out of range.
    """
    if beam_search is not None:
        return BeamSearchParams(max_tokens=max_tokens, **beam_search)
    own = {"max_tokens": max_tokens, "structured_outputs": answer_format}
    return sampling_params({**sampling, **own}, defaults)


def template_variables(stated: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Return the variables for a chat template.

    Args:
        stated: variables of the client.
        effort: reasoning effort. As in vLLM, it sets the variables `reasoning_effort` and, unless `stated` has it,
            `enable_thinking`; it has no effect on a template that uses neither.

    Raises:
        RequestError: a variable is reserved.
    """
    for name in stated or ():
        if name in _OWN_FIELDS:
            raise RequestError(f"{name} is reserved and cannot be a variable", "chat_template_kwargs")
    variables = dict(stated or {})
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    return variables
