"""Reasoning of Qwen 3 and later."""

from __future__ import annotations

from typing import ClassVar

from stoker_engine.server.parsers.reasoning.think import ThinkReasoningParser


class Qwen3ReasoningParser(ThinkReasoningParser):
    """Qwen 3's format: ``<think>…``, up to ``</think>`` or a tool call."""

    markers: ClassVar[tuple[str, ...]] = (*ThinkReasoningParser.markers, "<tool_call>")
    call_begins: ClassVar[str | None] = "<tool_call>"
