"""Whether a chat template supports system messages after the first message. Many reject them, and some drop them."""

from __future__ import annotations

from stoker_common.errors import RequestError
from stoker_engine.server.engine.engine_client import PromptTokenizer

_FIRST, _LATER = "be brief", "be kind"


async def takes_system_anywhere(tokenizer: PromptTokenizer) -> bool:
    """Return whether the chat template renders a later system message at its position."""
    roles = {"system": _FIRST, "user": "hello", "assistant": "hi"}
    chat = [{"role": role, "content": content} for role, content in roles.items()]
    chat += [{"role": "system", "content": _LATER}, {"role": "user", "content": "bye"}]
    try:
        text = await tokenizer.chat_text(chat)
    except RequestError:
        return False
    return -1 < text.find("hello") < text.find(_LATER) < text.find("bye")
