"""One turn of a conversation: messages in, the parts of the assistant's answer out, whole or as they come.

Every API that answers conversations makes a `ChatCompletionRequest` of its body, and writes the parts that a run
gives in its own shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from fastapi import Request

from stoker_common.errors import RequestError
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import PositionLogprobs
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.conversation.chat_prompt import ChatPrompt, render
from stoker_engine.server.conversation.chat_request import ChatCompletionRequest
from stoker_engine.server.conversation.constraint import constraint
from stoker_engine.server.conversation.generation import Generation, renamed
from stoker_engine.server.conversation.reasoning_tokens import ReasoningTokens
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.parsers.choice import Parsing
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from stoker_engine.server.schema.response_models import CompletionTokensDetails, Usage
from stoker_engine.tokens.prompt_tokens import prompt_tokens


@dataclass(frozen=True)
class AnswerDelta:
    """What is added to one choice.

    Attributes:
        parts: what the model said, as far as it can no longer change.
        token_ids, logprobs: the tokens behind it; their parts may come later.
        finish_reason: set on the last delta of a choice.
    """

    parts: list[Part]
    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class Answer:
    """One whole choice."""

    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def content(self) -> str:
        """The text of the answer."""
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def tool_calls(self) -> list[tuple[ToolCallStart, str]]:
        """Each call, and the text of its arguments."""
        calls: list[tuple[ToolCallStart, str]] = []
        for part in self.parts:
            if isinstance(part, ToolCallStart):
                calls.append((part, ""))
            elif isinstance(part, ToolCallArguments):
                start, arguments = calls[-1]
                calls[-1] = start, arguments + part.text
        return calls


class ChatRun:
    """One answer to a conversation, in n choices. Iterate `deltas` once, or `collect`.

    Attributes:
        body: what was asked.
        generation: runs it.
    """

    def __init__(self, body: ChatCompletionRequest, generation: Generation, parsing: Parsing) -> None:
        self.body = body
        self.generation = generation
        self._reasons = parsing.parsers.reasoning is not None
        self._choices = [_Choice(body, parsing) for _ in range(body.num_sequences)]

    @classmethod
    async def prepare(
        cls,
        body: ChatCompletionRequest,
        service: Service,
        request: Request,
        answer_id: str,
        field_names: Mapping[str, str] | None = None,
        *,
        bends: bool = False,
    ) -> ChatRun:
        """Checks and tokenizes all there is to check; nothing is generated before `deltas` or `collect`.

        Args:
            request: whose client may hang up meanwhile.
            answer_id: the answer's; the engine's requests are named after it.
            field_names: what the client calls the fields of `body`, where that is something else.
            bends: whether `max_tokens` is as much as the prompt leaves room for, where that is less.

        Raises:
            RequestError: it cannot be served as it is.
            ClientGoneError: the client hung up.
        """
        await service.wait_ready()
        outer = field_names or {}
        names = {**{name: outer.get(chat_name, chat_name) for name, chat_name in body.field_names.items()}, **outer}
        with renamed(names):
            service.check(body)
            of_tools = await cls._grammar_of_tools(body, service, request) if body.tool_use.tools else None
            rendered = await until_disconnect(request.receive, rendered_prompt(body, service))
            info = service.client.info
            limit = body.max_completion_tokens or body.max_tokens
            side = body.truncation_side or "left"
            prompt = prompt_tokens(rendered.token_ids, body.truncate_prompt_tokens, limit, info, side)
            room = info.max_model_len - len(prompt)
            params = body.params_for(info.sampling_defaults, room)
            if bends and params.max_tokens is not None:
                params = replace(params, max_tokens=min(params.max_tokens, room))
            parsing = await service.parsing(body, rendered.text)
            params = replace(params, visible_special_tokens=parsing.visible)
            if (structured := of_tools or params.structured_outputs) is not None:
                # What a model reasons before its answer is free; some grammars hold it, too.
                is_free = parsing.new_parser().is_reasoning and not service.parsers.forces_own_calls(body.tool_use)
                begins_after = parsing.answer_pattern if is_free else None
                params = params.with_structured_outputs(replace(structured, begins_after=begins_after))
        if of_tools is not None:  # errors of the grammar are the tools' then: the format has none
            names |= {f"structured_outputs.{kind}": "tools" for kind in ("json", "structural_tag")}
        generation = service.generation(answer_id, body, [prompt], [params], names)
        return cls(body, generation, parsing)

    @staticmethod
    async def _grammar_of_tools(
        body: ChatCompletionRequest, service: Service, request: Request
    ) -> StructuredOutputs | None:
        """What the tools ask for, and the format with them.

        Raises:
            RequestError: it cannot be, or the format is malformed.
            ClientGoneError: the client hung up.
        """
        of_tools = await asyncio.to_thread(constraint, body, service.parsers)
        if of_tools is None:
            return None
        if body.use_beam_search:
            raise RequestError(
                "tools that are strict are kept to their schemas by a grammar, which beam search does not follow: "
                "leave one of them out",
                "tools",
            )
        if (answer_format := body.requested_format) is not None and not body.tool_use.is_forced:
            await until_disconnect(request.receive, service.client.tokenizer.compile_grammar(answer_format))
        return of_tools

    async def deltas(self) -> AsyncGenerator[list[tuple[int, AnswerDelta]], None]:
        """Yields what there is, as soon as there is something: (index of a choice, delta); see `Generation.deltas`."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for step in deltas:
                yield [(choice, self._choices[choice].parsed(delta)) for choice, delta in step]

    async def collect(self) -> list[Answer]:
        """Waits for everything; one answer a choice."""
        answers = [Answer() for _ in self._choices]
        async with aclosing(self.deltas()) as deltas:
            async for step in deltas:
                for choice, delta in step:
                    answer = answers[choice]
                    answer.parts += delta.parts
                    answer.token_ids += delta.token_ids
                    answer.logprobs += delta.logprobs
                    answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        for answer in answers:
            answer.parts = merged(answer.parts)
        return answers

    @property
    def reasoning_tokens(self) -> int:
        """Tokens before the answer, over all choices, so far."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    def ends_with_call(self, choice: int) -> bool:
        """Whether a choice holds calls of tools, and the last one is complete: one that is cut off is not to be run."""
        return self._choices[choice].ends_with_call

    def usage(self, choice: int | None = None) -> Usage:
        """The tokens so far, of one choice or over all."""
        usage = self.generation.usage(choice)
        if self._reasons:
            reasoning_tokens = self.reasoning_tokens if choice is None else self._choices[choice].reasoning_tokens
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        return usage


class _Choice:
    """Takes one choice apart."""

    def __init__(self, body: ChatCompletionRequest, parsing: Parsing) -> None:
        self._num_calls = 0
        self._include_reasoning = body.include_reasoning is not False
        self._max_calls = None if body.tool_use.parallel else 1
        self._parser = parsing.new_parser()
        self._reasoning = ReasoningTokens(parsing.begins_after, self._parser.is_reasoning)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens before the answer, so far."""
        return self._reasoning.count

    @property
    def ends_with_call(self) -> bool:
        """Whether there are calls of tools so far, and the last one is complete."""
        return self._num_calls > 0 and not self._parser.is_within_call

    def parsed(self, delta: OutputDelta) -> AnswerDelta:
        """What a delta adds."""
        parts: Sequence[Part] = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts = merged([*parts, *self._parser.end()])
        self._reasoning.add(delta.token_ids, parts, self._parser.is_reasoning)
        kept_parts = merged(self._kept(parts))
        return AnswerDelta(kept_parts, delta.token_ids, delta.logprobs or [], delta.finish_reason, delta.stop_reason)

    def _kept(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Without reasoning that nobody wants to read and, as in vLLM, calls beyond those that were allowed."""
        for part in parts:
            self._num_calls += isinstance(part, ToolCallStart)
            too_many = self._max_calls is not None and self._num_calls > self._max_calls
            if isinstance(part, ToolCallStart | ToolCallArguments) and too_many:
                continue
            if self._include_reasoning or not isinstance(part, Reasoning):
                yield part


async def rendered_prompt(body: ChatCompletionRequest, service: Service) -> ChatPrompt:
    """The conversation as the model reads it.

    Raises:
        RequestError: the chat template refuses it, or it is too long.
    """
    excluded = body.tool_choice == "none" and service.args.frontend.exclude_tools_when_tool_choice_none
    return await render(
        body.messages,
        body,
        service,
        cut=body.truncate_prompt_tokens is not None,
        tools=() if excluded else body.template_tools,
        add_special_tokens=bool(body.add_special_tokens),
    )
