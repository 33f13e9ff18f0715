"""Reasoning of Kimi K2 Thinking."""

from __future__ import annotations

from typing import ClassVar

from stoker_engine.server.parsers.reasoning.think import ThinkReasoningParser


class KimiK2ReasoningParser(ThinkReasoningParser):
    """Kimi K2's format: ``<think>…``, up to ``</think>`` or a section of calls."""

    markers: ClassVar[tuple[str, ...]] = (*ThinkReasoningParser.markers, "<|tool_calls_section_begin|>")
    call_begins: ClassVar[str | None] = "<|tool_calls_section_begin|>"
