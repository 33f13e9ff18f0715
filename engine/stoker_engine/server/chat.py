"""/v1/chat/completions: messages in, the assistant's message out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker_engine.server.body import JSONRoute
from stoker_engine.server.disconnect import until_disconnect
from stoker_engine.server.generation import Generation
from stoker_engine.server.requests import ChatCompletionRequest
from stoker_engine.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
)
from stoker_engine.server.service import Service
from stoker_engine.server.sse import EventStream


def routes(service: Service) -> APIRouter:
    """The endpoint, for `service`."""
    router = APIRouter(route_class=JSONRoute)
    client = service.client

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation."""
        service.check_model(body.model)
        params = body.sampling_params(body.max_completion_tokens or body.max_tokens)
        messages = [message.for_template() for message in body.messages]
        # CPU work goes to a thread: the event loop answers others meanwhile.
        prompt = await asyncio.to_thread(client.tokenizer.render_chat, messages)
        generation = Generation(client, f"chatcmpl-{uuid.uuid4().hex}", [prompt], [params], _field_names(body))
        if body.stream:
            return EventStream(_events(body, generation, service.model_name))
        completion = await until_disconnect(request.receive, _whole(body, generation, service.model_name))
        return Response(completion.model_dump_json(), media_type="application/json")

    return router


def _field_names(body: ChatCompletionRequest) -> dict[str, str]:
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {"prompt": "messages", "max_tokens": limit}


async def _whole(body: ChatCompletionRequest, generation: Generation, model: str) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(content=output.text),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if body.return_token_ids else None,
        )
        for index, output in enumerate(await generation.collect())
    ]
    return ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=model,
        choices=choices,
        usage=generation.usage,
        prompt_token_ids=generation.prompts[0] if body.return_token_ids else None,
    )


async def _events(
    body: ChatCompletionRequest, generation: Generation, model: str
) -> AsyncGenerator[ChatCompletionChunk, None]:
    event = partial(ChatCompletionChunk, id=generation.id, created=generation.created, model=model)
    begun = False
    async with aclosing(generation.deltas()) as deltas:
        async for index, delta in deltas:
            if not begun:  # the role comes alone and first, but not before the engine took the request
                begun = True
                yield event(
                    choices=[ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))],
                    prompt_token_ids=generation.prompts[0] if body.return_token_ids else None,
                )
            if not (delta.text or delta.finish_reason or body.return_token_ids):
                continue  # part of a character: its text comes with the rest
            choice = ChatChunkChoice(
                index=index,
                delta=ChatDelta(content=delta.text or None),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                token_ids=delta.token_ids if body.return_token_ids else None,
            )
            yield event(choices=[choice])
    if body.include_usage:
        yield event(choices=[], usage=generation.usage)
