"""/tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import BaseModel, model_validator
from starlette.responses import Response

from stoker_common.errors import RequestError
from stoker_engine.server.connection.body import JSONRoute
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.conversation.chat_prompt import render
from stoker_engine.server.conversation.generation import renamed
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.fields.field_types import StrictModel, TokenIds
from stoker_engine.server.fields.unsupported import NoDict
from stoker_engine.server.openai.chat_request import ChatRendering, Messages
from stoker_engine.tokens.prompt_tokens import check_vocabulary


class TokenizeRequest(ChatRendering):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    media_io_kwargs: NoDict = None
    mm_processor_kwargs: NoDict = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        if self.messages is None:
            for name in ChatRendering.model_fields:
                if getattr(self, name):
                    raise RequestError(f"{name} applies only to messages, not to prompt", name)
        return self


class DetokenizeRequest(StrictModel):
    """Tokens to decode."""

    model: str | None = None
    tokens: TokenIds


class TokenizeResponse(BaseModel):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Response of /detokenize."""

    prompt: str


def routes(service: Service) -> APIRouter:
    """Return the endpoints; `service` handles their requests."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a text or a conversation."""
        await service.wait_ready()
        service.check_model(body.model)
        answer = await until_disconnect(request.receive, _tokenize(body, service))
        # In a thread, because very many tokens would block the event loop.
        return Response(await asyncio.to_thread(answer.model_dump_json), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
        """Return the text of tokens, including special ones."""
        await service.wait_ready()
        service.check_model(body.model)
        check_vocabulary(body.tokens, service.client.info.vocab_size, "tokens")
        decoding = service.client.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=await until_disconnect(request.receive, decoding))

    return router


async def _tokenize(body: TokenizeRequest, service: Service) -> TokenizeResponse:
    tokenizer = service.client.tokenizer
    if body.prompt is not None:
        service.check_length(body.prompt)
        tokens = (await tokenizer.encode([body.prompt], body.add_special_tokens is not False))[0]
    else:
        # In a thread, because very many messages would block the event loop.
        conversation = await asyncio.to_thread(body.conversation, body.messages or (), body.add_special_tokens)
        with renamed({"prompt": "messages"}):
            tokens = (await render(conversation, service)).token_ids
    return TokenizeResponse.model_construct(
        count=len(tokens),
        max_model_len=service.client.info.max_model_len,
        tokens=tokens,
        token_strs=tokenizer.vocabulary.ids_to_tokens(tokens) if body.return_token_strs else None,
    )
