"""/v1/completions: text in, text out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.server.body import JSONRoute
from stoker_engine.server.disconnect import until_disconnect
from stoker_engine.server.engine_client import PromptTokenizer
from stoker_engine.server.generation import Generation
from stoker_engine.server.requests import DEFAULT_MAX_TOKENS, CompletionRequest
from stoker_engine.server.responses import Completion, CompletionChoice
from stoker_engine.server.service import Service
from stoker_engine.server.sse import EventStream


def routes(service: Service) -> APIRouter:
    """The endpoint, for `service`."""
    router = APIRouter(route_class=JSONRoute)
    client = service.client

    @router.post("/v1/completions", response_model=Completion)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Completes a prompt, or several side by side."""
        service.check_model(body.model)
        # CPU work goes to a thread: the event loop answers others meanwhile.
        prompts = await asyncio.to_thread(_tokenize, body, client.tokenizer)
        params = [_params(body, client.max_model_len - len(prompt)) for prompt in prompts]
        generation = Generation(client, f"cmpl-{uuid.uuid4().hex}", prompts, params)
        if body.stream:
            return EventStream(_events(body, generation, service.model_name))
        completion = await until_disconnect(request.receive, _whole(body, generation, service.model_name))
        return Response(completion.model_dump_json(), media_type="application/json")

    return router


def _tokenize(body: CompletionRequest, tokenizer: PromptTokenizer) -> list[list[int]]:
    special = body.add_special_tokens is not False
    return [tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in body.prompts]


def _params(body: CompletionRequest, room: int) -> SamplingParams:
    """The default length bends to the room there is; a length that was asked for does not."""
    return body.sampling_params(body.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, room)))


async def _whole(body: CompletionRequest, generation: Generation, model: str) -> Completion:
    choices = [
        CompletionChoice(
            index=index,
            text=output.text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if body.return_token_ids else None,
            prompt_token_ids=generation.prompts[index] if body.return_token_ids else None,
        )
        for index, output in enumerate(await generation.collect())
    ]
    return Completion(
        id=generation.id, created=generation.created, model=model, choices=choices, usage=generation.usage
    )


async def _events(body: CompletionRequest, generation: Generation, model: str) -> AsyncGenerator[Completion, None]:
    event = partial(Completion, id=generation.id, created=generation.created, model=model)
    begun: set[int] = set()
    async with aclosing(generation.deltas()) as deltas:
        async for index, delta in deltas:
            if not (delta.text or delta.finish_reason or body.return_token_ids):
                continue  # part of a character: its text comes with the rest
            choice = CompletionChoice(
                index=index,
                text=delta.text,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            if body.return_token_ids:
                choice.token_ids = delta.token_ids
                choice.prompt_token_ids = None if index in begun else generation.prompts[index]
                begun.add(index)
            yield event(choices=[choice])
    if body.include_usage:
        yield event(choices=[], usage=generation.usage)
