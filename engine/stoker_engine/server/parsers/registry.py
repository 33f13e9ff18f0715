"""Parsers by vLLM's names. Each is imported when a model needs it."""

from __future__ import annotations

import importlib
from typing import Any, Final

from stoker_engine.server.parsers.parser import ReasoningParser, ToolParser

_TOOLS: Final = "stoker_engine.server.parsers.tools."
_REASONING: Final = "stoker_engine.server.parsers.reasoning."

TOOL_PARSERS: Final = {
    "deepseek_v3": _TOOLS + "deepseek_v3:DeepSeekV3ToolParser",
    "deepseek_v31": _TOOLS + "deepseek_v31:DeepSeekV31ToolParser",
    "glm45": _TOOLS + "glm45:Glm45ToolParser",
    "granite": _TOOLS + "granite:GraniteToolParser",
    "granite4": _TOOLS + "granite4:Granite4ToolParser",
    "hermes": _TOOLS + "hermes:HermesToolParser",
    "kimi_k2": _TOOLS + "kimi_k2:KimiK2ToolParser",
    "llama3_json": _TOOLS + "llama3_json:Llama3JsonToolParser",
    "llama4_pythonic": _TOOLS + "llama4_pythonic:Llama4PythonicToolParser",
    "mistral": _TOOLS + "mistral:MistralToolParser",
    "openai": _TOOLS + "openai:OpenAIToolParser",
    "pythonic": _TOOLS + "pythonic:PythonicToolParser",
    "qwen3_coder": _TOOLS + "qwen3_coder:Qwen3CoderToolParser",
    "qwen3_xml": _TOOLS + "qwen3_xml:Qwen3XMLToolParser",
}
REASONING_PARSERS: Final = {
    "deepseek_r1": _REASONING + "deepseek_r1:DeepSeekR1ReasoningParser",
    "glm45": _REASONING + "glm45:Glm45ReasoningParser",
    "granite": _REASONING + "granite:GraniteReasoningParser",
    "kimi_k2": _REASONING + "kimi_k2:KimiK2ReasoningParser",
    "openai_gptoss": _REASONING + "openai_gptoss:GptOssReasoningParser",
    "qwen3": _REASONING + "qwen3:Qwen3ReasoningParser",
}


def tool_parser(name: str) -> type[ToolParser]:
    """Return the tool call parser of that name."""
    parser: type[ToolParser] = _imported(TOOL_PARSERS[name])
    return parser


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """Return the reasoning parser of that name."""
    parser: type[ReasoningParser] = _imported(REASONING_PARSERS[name])
    return parser


def _imported(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
