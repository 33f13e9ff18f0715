"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.server.connection.body import JSONRoute
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.conversation.chat_run import Answer, AnswerDelta, ChatRun
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.conversation.sse import EventStream
from stoker_engine.server.conversation.text_events import EncodedEvent, TextEvents
from stoker_engine.server.fields.logprobs import LogprobWriter
from stoker_engine.server.middleware.request_id import HEADER, request_id
from stoker_engine.server.openai.chat_request import ChatCompletionRequest
from stoker_engine.server.openai.events import FRAMING, include_usage
from stoker_engine.server.openai.logprobs import ChatLogprobs, logprob_writer, prompt_logprobs
from stoker_engine.server.openai.response_models import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinishReason,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart


def routes(service: Service) -> APIRouter:
    """Return the endpoint of `service`."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Create a chat completion."""
        base_id = request_id(request, body.request_id)
        # In a thread, because many messages would block the event loop.
        chat = await asyncio.to_thread(body.to_request)
        run = await ChatRun.prepare(chat, service, request.receive, f"chatcmpl-{base_id}")
        logprobs = logprob_writer(service, body.num_logprobs, body.return_tokens_as_token_ids)
        writer = _Writer(body, run, run.generation.model, logprobs)
        headers = {HEADER: base_id}
        if body.stream:
            return EventStream(writer.events(include_usage(service, body)), headers, run.usage, FRAMING)
        completion = await until_disconnect(request.receive, writer.whole())
        return Response(completion.model_dump_json(), headers=headers, media_type="application/json")

    return router


@dataclass
class _Writer:
    """Writes an answer as one body or as events."""

    body: ChatCompletionRequest
    run: ChatRun
    model: str
    logprobs: LogprobWriter | None
    _started: set[int] = field(default_factory=set)  # choices whose role has been sent
    _calls: dict[int, int] = field(default_factory=dict)  # choice → index of its last streamed call
    _texts: dict[tuple[int, type[Part]], TextEvents] = field(default_factory=dict)  # by choice and kind of text

    async def whole(self) -> ChatCompletion:
        """Return the complete answer, once it is generated."""
        answers = await self.run.collect()
        # In a thread, because long logprobs would block the event loop.
        return await asyncio.to_thread(self._completion, answers)

    def _completion(self, answers: Sequence[Answer]) -> ChatCompletion:
        generation = self.run.generation
        choices = [
            ChatChoice(
                index=index,
                message=_message(answer, self.body.echoed),
                logprobs=self._logprobs(answer),
                finish_reason=self._finish_reason(index, answer.finish_reason),
                stop_reason=answer.stop_reason,
                token_ids=answer.token_ids if self.body.return_token_ids else None,
            )
            for index, answer in enumerate(answers)
        ]
        completion = ChatCompletion(
            id=generation.id,
            created=generation.created,
            model=self.model,
            choices=choices,
            usage=Usage.of(self.run.usage()),
        )
        if self.body.return_token_ids:
            completion.prompt_token_ids = generation.prompts[0]
        if self.body.num_prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(generation.prompt_logprobs[0])
        return completion

    async def events(self, include_usage: bool) -> AsyncGenerator[list[ChatCompletionChunk | EncodedEvent], None]:
        """Yield the answer's events as it is generated."""
        async with aclosing(self.run.deltas()) as deltas:
            async for step in deltas:
                yield [event for index, delta in step for event in self._events(index, delta)]
        if include_usage:
            yield [self._event(choices=[], usage=Usage.of(self.run.usage()))]

    @property
    def _event(self) -> partial[ChatCompletionChunk]:
        generation = self.run.generation
        return partial(ChatCompletionChunk, id=generation.id, created=generation.created, model=self.model)

    def _events(self, index: int, delta: AnswerDelta) -> Iterator[ChatCompletionChunk | EncodedEvent]:
        """Yield the events of a delta, if there is anything to send."""
        generation, body = self.run.generation, self.body
        text = _text_of(delta)
        is_more_than_text = delta.finish_reason or body.return_token_ids or body.continuous_usage
        if text is not None and index in self._started and not (is_more_than_text or self.logprobs is not None):
            yield self._text_events(index, type(text)).encoded(text.text)
            return
        usage = Usage.of(self.run.usage(index)) if body.continuous_usage else None
        if index not in self._started:  # the role is sent first and alone, once the engine has accepted the request
            prompt_ids = generation.prompts[0] if body.return_token_ids and not self._started else None
            self._started.add(index)
            role = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            yield self._event(choices=[role], prompt_token_ids=prompt_ids, usage=usage)
            if body.echoed:
                echoed = ChatChunkChoice(index=index, delta=ChatDelta(content=body.echoed))
                yield self._event(choices=[echoed], usage=usage)
        pieces = [self._piece(index, part) for part in delta.parts]
        if not pieces and text is not None:
            pieces.append(self._piece(index, text))
        if not pieces or (delta.finish_reason is not None and pieces[-1].tool_calls):
            # Clients expect no part of a call in the event that ends the choice.
            pieces.append(ChatDelta())
        for piece in pieces[:-1]:
            yield self._event(choices=[ChatChunkChoice(index=index, delta=piece)], usage=usage)
        if delta.is_held and not (delta.finish_reason or body.return_token_ids or self.logprobs is not None):
            return
        choice = ChatChunkChoice(
            index=index,
            delta=pieces[-1],
            logprobs=self._logprobs(delta),
            finish_reason=self._finish_reason(index, delta.finish_reason),
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if body.return_token_ids else None,
        )
        yield self._event(choices=[choice], usage=usage)

    def _text_events(self, index: int, kind: type[Content | Reasoning]) -> TextEvents:
        """Return the events that only add text of this kind to a choice."""

        def event(text: str) -> ChatCompletionChunk:
            return self._event(choices=[ChatChunkChoice(index=index, delta=self._piece(index, kind(text)))])

        if (index, kind) not in self._texts:
            self._texts[index, kind] = TextEvents(event)
        return self._texts[index, kind]

    def _piece(self, index: int, part: Part) -> ChatDelta:
        """Return what a part adds to a message."""
        match part:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case ToolCallStart():
                call = self._calls[index] = self._calls.get(index, -1) + 1
                function = FunctionDelta(name=part.name, arguments="")
                return ChatDelta(
                    tool_calls=[ToolCallDelta(index=call, id=_call_id(part), type="function", function=function)]
                )
            case ToolCallArguments(text):
                function = FunctionDelta(arguments=text)
                return ChatDelta(tool_calls=[ToolCallDelta(index=self._calls[index], function=function)])

    def _finish_reason(self, index: int, reason: FinishReason | None) -> ChatFinishReason | None:
        """Return OpenAI's finish reason: "stop" for a call that `tool_choice` names, "tool_calls" for other calls.

        A call that a stop string cut off is incomplete and must not be run, so it also ends with "stop".
        """
        if reason is FinishReason.STOP and self.run.ends_with_call(index) and self.body.tool_use.mode != "named":
            return "tool_calls"
        return reason

    def _logprobs(self, output: Answer | AnswerDelta) -> ChatLogprobs | None:
        if self.logprobs is None:
            return None
        return ChatLogprobs(content=self.logprobs.content(output.token_ids, output.logprobs))


def _text_of(delta: AnswerDelta) -> Content | Reasoning | None:
    """Return the text that a delta adds, empty for a token without text; None: it adds nothing, or not only text."""
    if len(delta.parts) == 1:
        part = delta.parts[0]
        return part if isinstance(part, Content | Reasoning) else None
    if delta.parts or delta.is_held or delta.finish_reason is not None:
        return None
    return Reasoning("") if delta.is_reasoning else Content("")


def _message(answer: Answer, echoed: str) -> ChatMessage:
    """Return a complete message. Its content is null only if it has reasoning or tool calls."""
    content, reasoning = echoed + answer.content, answer.reasoning or None
    calls = [
        ToolCall(id=_call_id(start), function=CalledFunction(name=start.name, arguments=arguments))
        for start, arguments in answer.tool_calls
    ]
    return ChatMessage(
        content=content if content or not (calls or reasoning) else None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or None,
    )


def _call_id(start: ToolCallStart) -> str:
    return start.id or f"chatcmpl-tool-{uuid4().hex}"
