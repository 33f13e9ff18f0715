"""Stoker's inference engine.

>>> from stoker_engine import LLM, SamplingParams
>>> llm = LLM("demo://gemma-3-270m")
>>> llm.generate("The capital of France is", SamplingParams(temperature=0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker_engine.core.lora_request import LoRARequest
    from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
    from stoker_engine.core.structured_outputs import StructuredOutputs, StructuredOutputsParams
    from stoker_engine.llm import LLM

__all__ = ["LLM", "BeamSearchParams", "LoRARequest", "SamplingParams", "StructuredOutputs", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    # Imported lazily: the operator imports `stoker_engine.contract` without torch installed.
    if name == "LLM":
        from stoker_engine.llm import LLM

        return LLM
    if name == "LoRARequest":
        from stoker_engine.core.lora_request import LoRARequest

        return LoRARequest
    if name in ("BeamSearchParams", "SamplingParams"):
        from stoker_engine.core import sampling_params

        return getattr(sampling_params, name)
    if name in ("StructuredOutputs", "StructuredOutputsParams"):
        from stoker_engine.core import structured_outputs

        return getattr(structured_outputs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
