"""Conversations → prompts, through the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from stoker_engine.contract.errors import RequestError
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.chat_request import ChatRendering
from stoker_engine.server.engine_client import PromptTokenizer
from stoker_engine.server.messages import Message


def render(
    messages: Sequence[Message],
    rendering: ChatRendering,
    tokenizer: PromptTokenizer,
    args: FrontendArgs,
    *,
    with_tools: bool = True,
    add_special_tokens: bool = False,
) -> list[int]:
    """The tokens of a conversation. CPU work; safe in any thread.

    Args:
        add_special_tokens: add those that the tokenizer adds to a text; most templates write their own.

    Raises:
        RequestError: the template refuses it, or it brings a template and none is trusted.
    """
    if rendering.chat_template is not None and not args.trust_request_chat_template:
        raise RequestError(
            "this server takes no chat template from a request; it would with --trust-request-chat-template",
            "chat_template",
        )
    generate = rendering.add_generation_prompt
    text = tokenizer.chat_text(
        [message.for_template() for message in messages],
        tools=[tool.for_template() for tool in rendering.tools] if rendering.tools and with_tools else None,
        documents=rendering.documents or None,
        chat_template=rendering.chat_template,
        chat_template_kwargs={**args.chat_template_defaults, **(rendering.chat_template_kwargs or {})},
        add_generation_prompt=not rendering.continue_final_message if generate is None else generate,
        continue_final_message=bool(rendering.continue_final_message),
    )
    return tokenizer.encode(text, add_special_tokens)
