"""The reasoning of DeepSeek R1, its distillates, QwQ and their like."""

from __future__ import annotations

from stoker_engine.server.parsers.reasoning.think import ThinkReasoningParser


class DeepSeekR1ReasoningParser(ThinkReasoningParser):
    """DeepSeek R1's format: ``<think>…</think>``. The tag that opens it is mostly the prompt's."""
