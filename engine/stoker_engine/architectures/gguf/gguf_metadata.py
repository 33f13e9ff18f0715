"""Metadata of a GGUF file, under llama.cpp's keys."""

from __future__ import annotations

from typing import Any, Protocol

from stoker_common.errors import ModelError


class Metadata(Protocol):
    """Metadata and tensors of a GGUF file."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``{architecture}.{key}``, or `default` if it is missing."""
        ...

    def has(self, tensor: str) -> bool:
        """Whether the file contains this tensor."""
        ...

    def values(self, tensor: str) -> list[float]:
        """Return the elements of this tensor, a vector."""
        ...


def rope_scaling(metadata: Metadata) -> dict[str, Any]:
    """Return the RoPE scaling as config.json's fields; empty if there is none.

    Raises:
        ModelError: the RoPE scaling is not supported.
    """
    kind = metadata.get("rope.scaling.type")
    if metadata.has("rope_factors_long.weight"):  # Phi-3's longrope, whatever rope.scaling.type states
        return {
            "original_max_position_embeddings": int(metadata.get("rope.scaling.original_context_length")),
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": metadata.values("rope_factors_short.weight"),
                "long_factor": metadata.values("rope_factors_long.weight"),
                "attention_factor": metadata.get("rope.scaling.attn_factor"),
            },
        }
    if metadata.has("rope_freqs.weight"):
        # Llama 3.1's interpolation, precomputed by the converter: one factor per pair, independent of the length.
        factors = metadata.values("rope_freqs.weight")
        scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_scaling": {**scaling, "original_max_position_embeddings": metadata.get("context_length")}}
    if kind in (None, "none"):
        return {}
    factor = float(metadata.get("rope.scaling.factor"))
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        original = metadata.get("rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if log_multiplier := metadata.get("rope.scaling.yarn_log_multiplier"):  # DeepSeek's: 0.1 × mscale_all_dim
            scaling |= {"mscale": 10 * log_multiplier, "mscale_all_dim": 10 * log_multiplier}
        return {"rope_scaling": scaling}
    raise ModelError(f"GGUF: rope scaling {kind!r} is not supported; supported are linear, yarn and longrope")
