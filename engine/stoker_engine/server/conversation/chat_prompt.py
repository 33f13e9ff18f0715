"""Conversations → prompts, through the model's chat template."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stoker_common.errors import RequestError
from stoker_engine.server.conversation.request import Conversation
from stoker_engine.server.conversation.service import Service


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    text: str
    token_ids: list[int]


async def render(conversation: Conversation, service: Service, *, cut: bool = False) -> ChatPrompt:
    """A conversation as the model's chat template writes it.

    Args:
        cut: whether it is cut to the model's context afterwards, so that no length is too much.

    Raises:
        RequestError: the template refuses it, it is too long, or it brings a template and none is trusted.
    """
    args, tokenizer = service.args.frontend, service.client.tokenizer
    if conversation.chat_template is not None and not args.trust_request_chat_template:
        raise RequestError(
            "this server takes no chat template from a request; it would with --trust-request-chat-template",
            "chat_template",
        )
    text = await tokenizer.chat_text(
        # There may be very many: the event loop answers others meanwhile.
        await asyncio.to_thread(lambda: [message.for_template() for message in conversation.messages]),
        tools=[tool.for_template() for tool in conversation.tools] or None,
        documents=conversation.documents or None,
        chat_template=conversation.chat_template,
        chat_template_kwargs={**args.chat_template_defaults, **conversation.template_kwargs},
        chat_template_content_format=args.chat_template_content_format,
        add_generation_prompt=conversation.begins_message,
        continue_final_message=conversation.continue_final_message,
    )
    if not cut:
        service.check_length(text)
    return ChatPrompt(text, (await tokenizer.encode([text], conversation.add_special_tokens))[0])
