"""Conversations → prompts, through a chat template."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stoker_common.errors import RequestError
from stoker_engine.server.conversation.request import Conversation
from stoker_engine.server.conversation.service import Service


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation rendered by the chat template."""

    text: str
    token_ids: list[int]


async def render(conversation: Conversation, service: Service, *, cut: bool = False) -> ChatPrompt:
    """Render a conversation with its own or the server's chat template, and tokenize it.

    Args:
        cut: whether any length is allowed, because the prompt will be truncated or only counted.

    Raises:
        RequestError: the template rejects the conversation, the prompt is too long, or the conversation has its own
            template and the server does not trust such templates.
    """
    args, tokenizer = service.args.frontend, service.client.tokenizer
    if conversation.chat_template is not None and not args.trust_request_chat_template:
        raise RequestError(
            "chat templates in requests are disabled; start the server with --trust-request-chat-template",
            "chat_template",
        )
    text = await tokenizer.chat_text(
        # In a thread, because many messages would block the event loop.
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
