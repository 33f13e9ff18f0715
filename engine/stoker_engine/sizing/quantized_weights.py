"""How large the matrices of a layer are when they are stored with fewer bits.

    bytes  =  numbers × bits ÷ 8  +  numbers ÷ group × bytes of a group's scale and zero point

Which tensors that concerns is said by `sizing.weight_sizes`: matrices of attention, MLP and experts. Embeddings,
head, norms and routers stay as they are. What a checkpoint says of itself is its config.json's
``quantization_config``; the spellings read here are those of transformers, AutoAWQ, GPTQModel and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final


@dataclass(frozen=True)
class QuantizedWeights:
    """How matrices are stored.

    Attributes:
        method: the name that ``--quantization`` takes.
        bits: of one number.
        group_size: numbers that share a scale; 0: so many (a row, a tensor) that scales weigh nothing.
        group_bytes: of one group's scale and zero point.
        block: output columns × input rows that share a scale, and so cannot be parted by tensor parallelism.
        experts_only: only the experts are stored so (gpt-oss).
    """

    method: str
    bits: float
    group_size: int = 0
    group_bytes: float = 0.0
    block: tuple[int, int] = (1, 1)
    experts_only: bool = False

    def stored_bytes(self, numbers: int) -> int:
        """What `numbers` numbers take."""
        scales = numbers / self.group_size * self.group_bytes if self.group_size else 0.0
        return int(numbers * self.bits / 8 + scales)


#: What a method stores where the checkpoint does not say otherwise, or where weights are quantized when loaded.
_USUAL: Final = {
    "awq": QuantizedWeights("awq", 4, 128, 2.5),
    "gptq": QuantizedWeights("gptq", 4, 128, 2.5),
    "fp8": QuantizedWeights("fp8", 8),
    "fbgemm_fp8": QuantizedWeights("fbgemm_fp8", 8),
    "int8_per_channel_weight_only": QuantizedWeights("int8_per_channel_weight_only", 8),
    "experts_int8": QuantizedWeights("experts_int8", 8),
    "mxfp4": QuantizedWeights("mxfp4", 4, 32, 1),
    "mxfp8": QuantizedWeights("mxfp8", 8, 32, 1),
    "modelopt": QuantizedWeights("modelopt", 8),
    "modelopt_fp4": QuantizedWeights("modelopt_fp4", 4, 16, 1, (1, 16)),
    "bitsandbytes": QuantizedWeights("bitsandbytes", 4, 64, 4),
}
#: Further names of the same.
_ALIASES: Final = {
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "gpt_oss_mxfp4": "mxfp4",
    "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8",
    "fp8_per_channel": "fp8",
    "nvfp4_per_token": "modelopt_fp4",
}


def canonical_method(method: str) -> str:
    """The format's name, of a name for it or for a kernel of it."""
    return _ALIASES.get(method, method)


def usual_weights(method: str) -> QuantizedWeights | None:
    """How `method` stores matrices, where nothing more is known; None: its size is not known."""
    return _USUAL.get(canonical_method(method))


def quantization_method(config: Mapping[str, Any]) -> str:
    """The method that a parsed config.json states; empty: its weights are not quantized."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return ""
    return str(stated.get("quant_method") or "unknown")


def quantized_weights(config: Mapping[str, Any]) -> QuantizedWeights | None:
    """How the checkpoint behind a parsed config.json stores its matrices; None: their size is not known.

    Only for a config that states a `quantization_method`.
    """
    stated: Mapping[str, Any] = config["quantization_config"]
    method = canonical_method(quantization_method(config))
    if method in ("awq", "gptq"):
        bits = int(stated.get("bits") or stated.get("w_bit") or 4)
        group = int(stated.get("group_size") or stated.get("q_group_size") or 128)
        return QuantizedWeights(method, bits, max(group, 0), 2 + bits / 8, (1, max(group, 1)))
    if method == "fp8":
        block = stated.get("weight_block_size")
        if not block:
            return _USUAL[method]
        columns, rows = int(block[0]), int(block[1])
        return QuantizedWeights(method, 8, columns * rows, 4, (max(columns, 1), max(rows, 1)))
    if method == "mxfp4":
        return replace(_USUAL[method], experts_only=True)
    if method == "bitsandbytes":
        return QuantizedWeights(method, 8) if stated.get("load_in_8bit") else _USUAL[method]
    if method == "compressed-tensors":
        return _compressed(stated)
    return usual_weights(method)


def _compressed(stated: Mapping[str, Any]) -> QuantizedWeights | None:
    """The first group's weights; checkpoints with several kinds of them state the same bits for nearly all layers."""
    groups = list((stated.get("config_groups") or {}).values())
    weights = groups[0].get("weights") if groups and isinstance(groups[0], Mapping) else None
    if not isinstance(weights, Mapping) or not weights.get("num_bits"):
        return None
    bits, group = int(weights["num_bits"]), int(weights.get("group_size") or 0)
    scale = 2 if weights.get("symmetric", True) else 3
    block = weights.get("block_structure")
    if isinstance(block, list) and len(block) == 2:
        columns, rows = max(int(block[0]), 1), max(int(block[1]), 1)
        return QuantizedWeights("compressed-tensors", bits, columns * rows, scale, (columns, rows))
    return QuantizedWeights("compressed-tensors", bits, max(group, 0), scale, (1, max(group, 1)))
