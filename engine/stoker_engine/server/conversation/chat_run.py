"""Run of one chat request: messages → parts of the assistant's answer, complete or streamed.

Each API builds a `ChatRequest` from its body and writes the parts of the run in its own format.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from starlette.types import Receive

from stoker_common.errors import RequestError
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import PositionLogprobs
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.conversation.chat_prompt import ChatPrompt, render
from stoker_engine.server.conversation.constraint import constraint
from stoker_engine.server.conversation.generation import Generation, renamed
from stoker_engine.server.conversation.reasoning_tokens import ReasoningTokens
from stoker_engine.server.conversation.request import ChatRequest
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.conversation.usage import Usage
from stoker_engine.server.parsers.choice import Parsing
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from stoker_engine.tokens.prompt_tokens import prompt_tokens


@dataclass(slots=True)
class AnswerDelta:
    """The next piece of one choice.

    Attributes:
        parts: the output that is final now, parsed.
        token_ids, logprobs: the tokens of this delta; their parts may follow in a later delta.
        is_held: whether the delta has no parts because a parser needs more text, or because they are left out.
        is_reasoning: whether the choice is still before its answer.
        finish_reason: set on the last delta of a choice.
    """

    parts: list[Part]
    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_held: bool = False
    is_reasoning: bool = False


@dataclass
class Answer:
    """One complete choice."""

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
        """The tool calls, each with the text of its arguments."""
        calls: list[tuple[ToolCallStart, str]] = []
        for part in self.parts:
            if isinstance(part, ToolCallStart):
                calls.append((part, ""))
            elif isinstance(part, ToolCallArguments):
                start, arguments = calls[-1]
                calls[-1] = start, arguments + part.text
        return calls


class ChatRun:
    """The answers to a chat request, `n` choices. Iterate `deltas` or call `collect`, once.

    Attributes:
        generation: its engine request.
    """

    def __init__(self, request: ChatRequest, generation: Generation, parsing: Parsing) -> None:
        self.generation = generation
        self._reasons = parsing.parsers.reasoning is not None
        self._choices = [_Choice(request, parsing) for _ in range(request.n)]

    @classmethod
    async def prepare(cls, request: ChatRequest, service: Service, receive: Receive, answer_id: str) -> ChatRun:
        """Validate and tokenize a request; nothing is generated before `deltas` or `collect`.

        Args:
            receive: the ASGI channel that reports the client's disconnect.
            answer_id: id of the answer, from which the ids of the engine's requests are derived.

        Raises:
            RequestError: the request cannot be served.
            NotStartedError: the model is unavailable.
            ClientGoneError: the client disconnected.
        """
        await service.wait_ready()
        names = request.field_names
        with renamed(names):
            model = service.check(request.model, request.priority)
            of_tools = await cls._grammar_of_tools(request, service, receive) if request.tool_use.tools else None
            rendered = await until_disconnect(receive, rendered_prompt(request, service))
            info = service.client.info
            prompt = prompt_tokens(
                rendered.token_ids,
                request.truncate_prompt_tokens,
                request.max_tokens,
                info,
                request.truncation_side,
            )
            params = request.params(info.sampling_defaults, info.max_model_len - len(prompt))
            parsing = await service.parsing(request, rendered.text)
            params = replace(params, visible_special_tokens=parsing.visible)
            if (structured := of_tools or params.structured_outputs) is not None:
                # Reasoning before the answer is unconstrained, unless the tool parser's grammar includes it.
                is_free = parsing.new_parser().is_reasoning and not service.parsers.forces_own_calls(request.tool_use)
                begins_after = parsing.answer_pattern if is_free else None
                params = params.with_structured_outputs(replace(structured, begins_after=begins_after))
        if of_tools is not None:  # errors of this grammar concern the tools: the format has been checked
            names = {**names, **{f"structured_outputs.{kind}": "tools" for kind in ("json", "structural_tag")}}
        generation = service.generation(
            answer_id,
            model,
            [prompt],
            [params],
            n=request.n,
            priority=request.priority,
            cache_salt=request.cache_salt,
            stream_interval=request.stream_interval,
            field_names=names,
        )
        return cls(request, generation, parsing)

    @staticmethod
    async def _grammar_of_tools(request: ChatRequest, service: Service, receive: Receive) -> StructuredOutputs | None:
        """Return the constraint that the tools require, combined with the answer's format; None if they require none.

        Raises:
            RequestError: the constraint is not possible, or the format is malformed.
            ClientGoneError: the client disconnected.
        """
        of_tools = await asyncio.to_thread(constraint, request, service.parsers)
        if of_tools is None:
            return None
        if request.beam_search is not None:
            raise RequestError(
                "strict tools are enforced by a grammar, which beam search does not support: omit strict or "
                "use_beam_search",
                "tools",
            )
        if request.answer_format is not None and not request.tool_use.is_forced:
            await until_disconnect(receive, service.client.tokenizer.compile_grammar(request.answer_format))
        return of_tools

    async def deltas(self, *, whole: bool = False) -> AsyncGenerator[list[tuple[int, AnswerDelta]], None]:
        """Yield new output as soon as it is available: (index of a choice, delta); see `Generation.deltas`."""
        async with aclosing(self.generation.deltas(whole=whole)) as deltas:
            async for step in deltas:
                yield [(choice, self._choices[choice].parsed(delta)) for choice, delta in step]

    async def collect(self) -> list[Answer]:
        """Wait for the complete answers, one per choice."""
        answers = [Answer() for _ in self._choices]
        # The count of reasoning tokens is exact only if each delta is short.
        async with aclosing(self.deltas(whole=not self._reasons)) as deltas:
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
        """Number of reasoning tokens so far, including markers, over all choices."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    def ends_with_call(self, choice: int) -> bool:
        """Return whether a choice has tool calls and the last one is complete; an incomplete call must not be run."""
        return self._choices[choice].ends_with_call

    def usage(self, choice: int | None = None) -> Usage:
        """Return the token counts so far, of one choice or of all."""
        usage = self.generation.usage(choice)
        if not self._reasons:
            return usage
        return replace(
            usage, reasoning_tokens=self.reasoning_tokens if choice is None else self._choices[choice].reasoning_tokens
        )


class _Choice:
    """Parses the output of one choice."""

    def __init__(self, request: ChatRequest, parsing: Parsing) -> None:
        self._num_calls = 0
        self._holds = False  # whether the parser holds back the latest text
        self._include_reasoning = request.include_reasoning
        self._max_calls = None if request.tool_use.parallel else 1
        self._parser = parsing.new_parser()
        self._reasoning = ReasoningTokens(parsing.begins_after, self._parser.is_reasoning)

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, including markers."""
        return self._reasoning.count

    @property
    def ends_with_call(self) -> bool:
        """See `ChatRun.ends_with_call`."""
        return self._num_calls > 0 and not self._parser.is_within_call

    def parsed(self, delta: OutputDelta) -> AnswerDelta:
        """Parse the choice's next delta."""
        parts: Sequence[Part] = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts = merged([*parts, *self._parser.end()])
        is_reasoning = self._parser.is_reasoning
        self._reasoning.add(delta.token_ids, parts, is_reasoning)
        kept_parts = merged(self._kept(parts))
        if delta.text:
            self._holds = not parts
        is_left_out = is_reasoning and not self._include_reasoning
        return AnswerDelta(
            kept_parts,
            delta.token_ids,
            delta.logprobs or [],
            delta.finish_reason,
            delta.stop_reason,
            is_held=not kept_parts and (bool(delta.text) or self._holds or self._parser.is_within_call or is_left_out),
            is_reasoning=is_reasoning,
        )

    def _kept(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Drop reasoning that the request excludes and, as vLLM does, calls beyond the allowed number."""
        for part in parts:
            self._num_calls += isinstance(part, ToolCallStart)
            too_many = self._max_calls is not None and self._num_calls > self._max_calls
            if isinstance(part, ToolCallStart | ToolCallArguments) and too_many:
                continue
            if self._include_reasoning or not isinstance(part, Reasoning):
                yield part


async def rendered_prompt(request: ChatRequest, service: Service) -> ChatPrompt:
    """Return the rendered prompt of a request.

    Raises:
        RequestError: see `render`.
    """
    conversation = request.conversation
    if request.tool_use.mode == "none" and service.args.frontend.exclude_tools_when_tool_choice_none:
        conversation = replace(conversation, tools=())
    return await render(conversation, service, cut=request.truncate_prompt_tokens is not None)
