"""Conversations → prompts, through the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from stoker_common.errors import RequestError
from stoker_engine.server.conversation.chat_request import ChatRendering
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.schema.messages import Message, Tool


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]


async def render(
    messages: Sequence[Message],
    rendering: ChatRendering,
    service: Service,
    *,
    tools: Sequence[Tool] | None,
    add_special_tokens: bool = False,
    cut: bool = False,
) -> ChatPrompt:
    """A conversation as the model's chat template writes it.

    Args:
        tools: those that the model is told.
        add_special_tokens: add those that the tokenizer adds to a text; most templates write their own.
        cut: whether it is cut to the model's context afterwards, so that no length is too much.

    Raises:
        RequestError: the template refuses it, it is too long, or it brings a template and none is trusted.
    """
    args, tokenizer = service.args.frontend, service.client.tokenizer
    if rendering.chat_template is not None and not args.trust_request_chat_template:
        raise RequestError(
            "this server takes no chat template from a request; it would with --trust-request-chat-template",
            "chat_template",
        )
    text = await tokenizer.chat_text(
        # There may be very many: the event loop answers others meanwhile.
        await asyncio.to_thread(lambda: [message.for_template() for message in messages]),
        tools=[tool.for_template() for tool in tools] if tools else None,
        documents=rendering.documents or None,
        chat_template=rendering.chat_template,
        chat_template_kwargs={**args.chat_template_defaults, **rendering.template_kwargs},
        chat_template_content_format=args.chat_template_content_format,
        add_generation_prompt=rendering.begins_message,
        continue_final_message=bool(rendering.continue_final_message),
    )
    if not cut:
        service.check_length(text)
    return ChatPrompt(text, (await tokenizer.encode([text], add_special_tokens))[0])
