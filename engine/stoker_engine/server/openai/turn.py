"""One turn of a conversation: messages in, the parts of the assistant's answer out, whole or as they come.

Every API that answers conversations makes a `ChatCompletionRequest` of its body, and writes what a turn gives in its
own shape.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from fastapi import Request

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import PositionLogprobs
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.engine.generation import Generation, renamed
from stoker_engine.server.openai.chat_prompt import ChatPrompt, render
from stoker_engine.server.openai.chat_request import ChatCompletionRequest
from stoker_engine.server.parsers.parser import AnswerParser
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from stoker_engine.server.service import Service
from stoker_engine.tokens.prompt_tokens import prompt_tokens


@dataclass(frozen=True)
class TurnDelta:
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


class Turn:
    """One answer to a conversation, in n choices. Iterate `deltas` once, or `collect`.

    Attributes:
        body: what was asked.
        generation: runs it.
        has_calls: choices that hold a call so far.
        reasoning_tokens: over all choices, so far.
    """

    def __init__(
        self, body: ChatCompletionRequest, generation: Generation, new_parser: Callable[[], AnswerParser]
    ) -> None:
        self.body = body
        self.generation = generation
        self.has_calls: set[int] = set()
        self.reasoning_tokens = 0
        self._parsers = [new_parser() for _ in range(body.num_sequences)]

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
    ) -> Turn:
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
        names = {**body.field_names, **(field_names or {})}
        with renamed(names):
            service.check(body)
            rendered = await until_disconnect(request.receive, rendered_prompt(body, service))
            info = service.client.info
            limit = body.max_completion_tokens or body.max_tokens
            prompt = prompt_tokens(rendered.token_ids, body.truncate_prompt_tokens, limit, info)
            room = info.max_model_len - len(prompt)
            params = body.params_for(info.sampling_defaults, room)
            if bends and params.max_tokens is not None:
                params = replace(params, max_tokens=min(params.max_tokens, room))
            parsing = service.parsing(body, rendered.text)
            params = replace(params, visible_special_tokens=parsing.visible)
        generation = service.generation(answer_id, body, [prompt], [params], names)
        return cls(body, generation, parsing.new_parser)

    async def deltas(self) -> AsyncGenerator[list[tuple[int, TurnDelta]], None]:
        """Yields what there is, as soon as there is something: (index of a choice, delta); see `Generation.deltas`."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for step in deltas:
                yield [(choice, self._parsed(choice, delta)) for choice, delta in step]

    async def collect(self) -> list[Answer]:
        """Waits for everything; one answer a choice."""
        answers = [Answer() for _ in self._parsers]
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

    def _parsed(self, choice: int, delta: OutputDelta) -> TurnDelta:
        parser = self._parsers[choice]
        if parser.is_reasoning:
            self.reasoning_tokens += len(delta.token_ids)
        parts: Sequence[Part] = parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts = merged([*parts, *parser.end()])
        if any(isinstance(part, ToolCallStart) for part in parts):
            self.has_calls.add(choice)
        return TurnDelta(list(parts), delta.token_ids, delta.logprobs or [], delta.finish_reason, delta.stop_reason)


async def rendered_prompt(body: ChatCompletionRequest, service: Service) -> ChatPrompt:
    """The conversation as the model reads it.

    Raises:
        RequestError: the chat template refuses it, or it is too long.
    """
    args = service.args.frontend
    return await render(
        body.messages,
        body,
        service,
        cut=body.truncate_prompt_tokens is not None,
        with_tools=not (args.exclude_tools_when_tool_choice_none and body.tool_choice == "none"),
        add_special_tokens=bool(body.add_special_tokens),
    )
