"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from stoker_engine.server.anthropic.answer import (
    AnthropicMessage,
    AnthropicUsage,
    MessageTokensCount,
    content_blocks,
    stop_reason,
)
from stoker_engine.server.anthropic.events import BlockEvents, MessageDelta, MessageStart, MessageStop, Ping, Stopped
from stoker_engine.server.anthropic.request import ConversationBody, CountTokensRequest, MessagesRequest
from stoker_engine.server.anthropic.system_places import takes_system_anywhere
from stoker_engine.server.connection.body import JSONRoute
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.conversation.chat_run import Answer, AnswerDelta, ChatRun, rendered_prompt
from stoker_engine.server.conversation.generation import renamed
from stoker_engine.server.conversation.request import ChatRequest
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.conversation.sse import EventStream, Framing, event
from stoker_engine.server.errors import anthropic
from stoker_engine.server.errors.description import describe
from stoker_engine.server.middleware import request_id


def routes(service: Service) -> APIRouter:
    """Return the endpoints of `service`."""
    failed = {"model": anthropic.AnthropicErrorResponse}
    router = APIRouter(route_class=JSONRoute, responses={"4XX": failed, "5XX": failed})
    chats = _Chats(service)

    @router.post("/v1/messages", response_model=AnthropicMessage)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Create a message."""
        chat = await chats.of(body)
        name = request_id.request_id(request, None)
        run = await ChatRun.prepare(chat, service, request.receive, f"msg_{name}")
        writer = _Writer(body, run, run.generation.model)
        headers = {request_id.HEADER: name, anthropic.HEADER: name}
        if body.stream:
            framing = Framing(named=True, last=b"", error=partial(_error, name))
            return EventStream(writer.events(), headers, run.usage, framing)
        message = await until_disconnect(request.receive, writer.whole())
        return Response(message.model_dump_json(), headers=headers, media_type="application/json")

    @router.post("/v1/messages/count_tokens", response_model=MessageTokensCount)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a message's prompt, of any length."""
        chat = await chats.of(body)
        service.check_model(chat.model)
        chat = replace(chat, truncate_prompt_tokens=-1)  # disables the length check
        with renamed(chat.field_names):
            prompt = await until_disconnect(request.receive, rendered_prompt(chat, service))
        name = request_id.request_id(request, None)
        count = MessageTokensCount(input_tokens=len(prompt.token_ids))
        return Response(count.model_dump_json(), headers={anthropic.HEADER: name}, media_type="application/json")

    return router


class _Chats:
    """Converts bodies to requests for one model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._system_anywhere: bool | None = None

    async def of(self, body: ConversationBody) -> ChatRequest:
        """Return the request of `body`.

        Raises:
            RequestError: the request is invalid, or the model is unavailable.
        """
        await self._service.wait_ready()
        if body.has_later_system and self._system_anywhere is None:
            self._system_anywhere = await takes_system_anywhere(self._service.client.tokenizer)
        # In a thread, because a long body would block the event loop.
        return await asyncio.to_thread(body.to_request, system_anywhere=self._system_anywhere is not False)


@dataclass
class _Writer:
    """Writes an answer as one body or as events."""

    body: MessagesRequest
    run: ChatRun
    model: str
    _blocks: BlockEvents = field(init=False)
    _has_started: bool = False

    def __post_init__(self) -> None:
        self._blocks = BlockEvents(self._show_thinking)

    @property
    def _show_thinking(self) -> bool:
        return self.body.thinking is None or self.body.thinking.display != "omitted"

    async def whole(self) -> AnthropicMessage:
        """Return the complete answer, once it is generated."""
        [answer] = await self.run.collect()
        message = self._message()
        message.content = content_blocks(answer.parts, show_thinking=self._show_thinking)
        stopped = self._stopped(answer)
        message.stop_reason, message.stop_sequence = stopped.stop_reason, stopped.stop_sequence
        return message

    async def events(self) -> AsyncGenerator[list[BaseModel], None]:
        """Yield the answer's events as it is generated."""
        async with aclosing(self.run.deltas()) as deltas:
            async for step in deltas:
                yield [each for _, delta in step for each in self._events(delta)]

    def _events(self, delta: AnswerDelta) -> Iterator[BaseModel]:
        if not self._has_started:  # sent only after the engine has accepted the request
            self._has_started = True
            yield MessageStart(message=self._message())
            yield Ping()
        for part in delta.parts:
            yield from self._blocks.write(part)
        if delta.finish_reason is not None:
            yield from self._blocks.end()
            yield MessageDelta(delta=self._stopped(delta), usage=self._usage())
            yield MessageStop()

    def _message(self) -> AnthropicMessage:
        return AnthropicMessage(id=self.run.generation.id, model=self.model, usage=self._usage())

    def _usage(self) -> AnthropicUsage:
        return AnthropicUsage.of(self.run.usage())

    def _stopped(self, end: Answer | AnswerDelta) -> Stopped:
        bent = self.run.generation.params[0].max_tokens != self.body.max_tokens
        calls = self.run.ends_with_call(0)
        reason, sequence = stop_reason(end.finish_reason, end.stop_reason, calls=calls, bent=bent)
        return Stopped(stop_reason=reason, stop_sequence=sequence)


def _error(name: str, error: Exception) -> bytes:
    """Return the event that ends a failed stream."""
    return event(anthropic.encode(describe(error), name), "error")
