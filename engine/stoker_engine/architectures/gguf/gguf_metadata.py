"""What a GGUF file's metadata say, under llama.cpp's keys."""

from __future__ import annotations

from typing import Any, Protocol

from stoker_common.errors import ModelError


class Metadata(Protocol):
    """What a GGUF file says of its model."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{architecture}.{key}``."""
        ...

    def has(self, tensor: str) -> bool:
        """Whether the file holds that tensor."""
        ...

    def values(self, tensor: str) -> list[float]:
        """The numbers of that tensor, a vector."""
        ...


def rope_scaling(metadata: Metadata) -> dict[str, Any]:
    """How positions are stretched, as config.json's ``rope_scaling``.

    Raises:
        ModelError: in a way that is not read.
    """
    kind = metadata.get("rope.scaling.type")
    if metadata.has("rope_factors_long.weight"):  # Phi-3's longrope, whatever the type says
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
        # Llama 3.1's blend, worked out by the converter: one factor a pair, the same at every length.
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
