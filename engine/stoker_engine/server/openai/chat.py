"""/v1/chat/completions: messages in, the assistant's message out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker_engine.core.outputs import OutputDelta
from stoker_engine.server.connection.body import JSONRoute
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.connection.sse import EventStream
from stoker_engine.server.engine.generation import Generation, Output, renamed
from stoker_engine.server.middleware.request_id import HEADER, request_id
from stoker_engine.server.openai.chat_prompt import render
from stoker_engine.server.openai.chat_request import ChatCompletionRequest
from stoker_engine.server.openai.logprobs import ChatLogprobs, LogprobWriter, prompt_logprobs
from stoker_engine.server.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
)
from stoker_engine.server.service import Service
from stoker_engine.tokens.prompt_tokens import prompt_tokens


def routes(service: Service) -> APIRouter:
    """The endpoint, for `service`."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation."""
        await service.wait_ready()
        service.check(body)
        with renamed(body.field_names):
            tokens = await until_disconnect(request.receive, _tokenize(body, service))
            info = service.client.info
            limit = body.max_completion_tokens or body.max_tokens
            prompt = prompt_tokens(tokens, body.truncate_prompt_tokens, limit, info)
            params = body.params_for(info.sampling_defaults, info.max_model_len - len(prompt))
        base_id = request_id(request, body.request_id)
        generation = service.generation(f"chatcmpl-{base_id}", body, [prompt], [params], body.field_names)
        writer = _Writer(body, generation, service.model_name, service.logprobs(body, body.num_logprobs))
        headers = {HEADER: base_id}
        if body.stream:
            return EventStream(writer.events(service.include_usage(body)), headers)
        completion = await until_disconnect(request.receive, writer.whole())
        return Response(completion.model_dump_json(), headers=headers, media_type="application/json")

    return router


async def _tokenize(body: ChatCompletionRequest, service: Service) -> list[int]:
    args = service.args.frontend
    return await render(
        body.messages,
        body,
        service,
        cut=body.truncate_prompt_tokens is not None,
        with_tools=not (args.exclude_tools_when_tool_choice_none and body.tool_choice == "none"),
        add_special_tokens=bool(body.add_special_tokens),
    )


@dataclass
class _Writer:
    """Writes an answer, whole or in events."""

    body: ChatCompletionRequest
    generation: Generation
    model: str
    logprobs: LogprobWriter | None
    _begun: set[int] = field(default_factory=set)  # choices whose role is written

    async def whole(self) -> ChatCompletion:
        """The answer, once all of it is there."""
        outputs = await self.generation.collect()
        # Logprobs may be long, and others want to be answered meanwhile.
        return await asyncio.to_thread(self._completion, outputs)

    def _completion(self, outputs: Sequence[Output]) -> ChatCompletion:
        generation = self.generation
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content=output.text),
                logprobs=self._logprobs(output),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if self.body.return_token_ids else None,
            )
            for index, output in enumerate(outputs)
        ]
        answer = ChatCompletion(
            id=generation.id, created=generation.created, model=self.model, choices=choices, usage=generation.usage()
        )
        if self.body.return_token_ids:
            answer.prompt_token_ids = generation.prompts[0]
        if self.body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(generation.prompt_logprobs[0])
        return answer

    async def events(self, include_usage: bool) -> AsyncGenerator[list[ChatCompletionChunk], None]:
        """The answer as it is made."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for step in deltas:
                yield [event for index, delta in step for event in self._events(index, delta)]
        if include_usage:
            yield [self._event(choices=[], usage=self.generation.usage())]

    @property
    def _event(self) -> partial[ChatCompletionChunk]:
        generation = self.generation
        return partial(ChatCompletionChunk, id=generation.id, created=generation.created, model=self.model)

    def _events(self, index: int, delta: OutputDelta) -> Iterator[ChatCompletionChunk]:
        """The events of a delta, if there is anything to send."""
        generation, body = self.generation, self.body
        if index not in self._begun:  # the role comes alone and first, but not before the engine took the request
            prompt_ids = generation.prompts[0] if body.return_token_ids and not self._begun else None
            self._begun.add(index)
            role = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            yield self._event(choices=[role], prompt_token_ids=prompt_ids)
        if not (delta.text or delta.finish_reason or body.return_token_ids or self.logprobs is not None):
            return  # part of a character: its text comes with the rest
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=delta.text or None),
            logprobs=self._logprobs(Output(delta.text, delta.token_ids, delta.logprobs or [])),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if body.return_token_ids else None,
        )
        yield self._event(choices=[choice], usage=generation.usage(index) if body.continuous_usage else None)

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        return None if self.logprobs is None else self.logprobs.chat(output.token_ids, output.logprobs)
