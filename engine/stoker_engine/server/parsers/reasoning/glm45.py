"""Reasoning of GLM 4.5 and later."""

from __future__ import annotations

from typing import ClassVar

from stoker_engine.server.parsers.reasoning.think import ThinkReasoningParser


class Glm45ReasoningParser(ThinkReasoningParser):
    """GLM 4.5's format: ``<think>…``, up to ``</think>`` or a tool call."""

    markers: ClassVar[tuple[str, ...]] = (*ThinkReasoningParser.markers, "<tool_call>")
    call_begins: ClassVar[str | None] = "<tool_call>"
