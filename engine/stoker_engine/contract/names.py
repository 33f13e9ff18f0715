"""Names of dtypes, devices, back ends, parsers and other choices, in one place."""

from __future__ import annotations

from typing import Final, Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"]
Device = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]
AttentionBackend = Literal["auto", "native", "triton", "sdpa", "flash-attn", "flashinfer", "fa3"]

ToolCallParser = Literal[
    "deepseek_v3", "deepseek_v31", "glm45", "granite", "granite4", "hermes", "kimi_k2", "llama3_json",
    "llama4_pythonic", "mistral", "openai", "pythonic", "qwen3_coder", "qwen3_xml",
]  # fmt: skip
ReasoningParser = Literal["deepseek_r1", "glm45", "granite", "kimi_k2", "openai_gptoss", "qwen3"]
#: Form in which a chat template gets message contents: auto, all as strings, or all as lists of parts.
ContentFormat = Literal["auto", "string", "openai"]

DTYPES: Final[tuple[str, ...]] = get_args(Dtype)
KV_CACHE_DTYPES: Final[tuple[str, ...]] = get_args(KVCacheDtype)
DEVICES: Final[tuple[str, ...]] = get_args(Device)
ATTENTION_BACKENDS: Final[tuple[str, ...]] = get_args(AttentionBackend)
SCHEDULING_POLICIES: Final[tuple[str, ...]] = get_args(SchedulingPolicy)
TOOL_CALL_PARSERS: Final[tuple[str, ...]] = get_args(ToolCallParser)
REASONING_PARSERS: Final[tuple[str, ...]] = get_args(ReasoningParser)
CONTENT_FORMATS: Final[tuple[str, ...]] = get_args(ContentFormat)
