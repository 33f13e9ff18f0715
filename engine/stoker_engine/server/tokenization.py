"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import model_validator

from stoker_engine.contract.errors import RequestError
from stoker_engine.server.body import JSONRoute
from stoker_engine.server.chat_prompt import render
from stoker_engine.server.chat_request import ChatRendering, Messages
from stoker_engine.server.field_types import StrictModel, TokenIds
from stoker_engine.server.responses import DetokenizeResponse, TokenizeResponse
from stoker_engine.server.service import Service
from stoker_engine.server.unbuilt import NoDict


class TokenizeRequest(ChatRendering):
    """A text, or a conversation."""

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
            raise RequestError("give either prompt or messages", "prompt")
        if self.messages is None:
            for name in ChatRendering.model_fields:
                if getattr(self, name):
                    raise RequestError(f"{name} belongs to messages, and there is a prompt", name)
        return self


class DetokenizeRequest(StrictModel):
    """Tokens."""

    model: str | None = None
    tokens: TokenIds


def routes(service: Service) -> APIRouter:
    """The endpoints, for `service`."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """The tokens that the model would read."""
        await service.wait_ready()
        service.check_model(body.model)
        return await asyncio.to_thread(_tokenize, body, service)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of tokens, special ones included."""
        await service.wait_ready()
        service.check_model(body.model)
        service.check_tokens(body.tokens, "tokens")
        text = await asyncio.to_thread(service.client.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=text)

    return router


def _tokenize(body: TokenizeRequest, service: Service) -> TokenizeResponse:
    tokenizer = service.client.tokenizer
    if body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    else:
        special = bool(body.add_special_tokens)
        tokens = render(body.messages or (), body, tokenizer, service.args.frontend, add_special_tokens=special)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=service.client.info.max_model_len,
        tokens=tokens,
        token_strs=tokenizer.ids_to_tokens(tokens) if body.return_token_strs else None,
    )
