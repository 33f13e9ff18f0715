"""The parser ``qwen3_coder`` under another of vLLM's names."""

from __future__ import annotations

from stoker_engine.server.parsers.tools.qwen3_coder import Qwen3CoderToolParser


class Qwen3XMLToolParser(Qwen3CoderToolParser):
    """Qwen3-Coder's format."""
