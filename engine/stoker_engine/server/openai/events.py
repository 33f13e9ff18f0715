"""Framing and usage of the event streams of OpenAI's chats and completions."""

from __future__ import annotations

from typing import Final

from stoker_engine.server.conversation.service import Service
from stoker_engine.server.conversation.sse import Framing, event
from stoker_engine.server.errors import openai
from stoker_engine.server.errors.description import describe
from stoker_engine.server.openai.sampled_request import SampledRequest


def _error(error: Exception) -> bytes:
    return event(openai.encode(describe(error)))


FRAMING: Final = Framing(named=False, last=event(b"[DONE]"), error=_error)


def include_usage(service: Service, body: SampledRequest) -> bool:
    """Return whether the last event before `[DONE]` reports the usage of all choices."""
    return body.include_usage or service.args.frontend.enable_force_include_usage
