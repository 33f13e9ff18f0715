"""Reasoning of DeepSeek R1, its distillates, QwQ and similar models."""

from __future__ import annotations

from stoker_engine.server.parsers.reasoning.think import ThinkReasoningParser


class DeepSeekR1ReasoningParser(ThinkReasoningParser):
    """DeepSeek R1's format: ``<think>…</think>``. The opening tag is usually in the prompt."""
