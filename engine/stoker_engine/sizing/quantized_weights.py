"""Sizes of a layer's matrices that another engine quantizes while loading (``--quantization``).

    bytes  =  elements × bits ÷ 8  +  elements ÷ group × bytes of a group's scale and zero point

This concerns the matrices of attention, MLP and experts (`sizing.weight_sizes`). Embeddings, head, norms and routers
are not quantized. For checkpoints that are already quantized see `planned_formats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class QuantizedWeights:
    """Storage format of quantized matrices.

    Attributes:
        method: value of ``--quantization``.
        bits: bits of one element.
        group_size: elements that share a scale; 0: so many (a row, a tensor) that the scales' size is negligible.
        group_bytes: bytes of one group's scale and zero point.
    """

    method: str
    bits: float
    group_size: int = 0
    group_bytes: float = 0.0

    def stored_bytes(self, numbers: int) -> int:
        """Return the bytes of `numbers` elements."""
        scales = numbers / self.group_size * self.group_bytes if self.group_size else 0.0
        return int(numbers * self.bits / 8 + scales)


#: Method → usual format of its weights.
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
    "modelopt_fp4": QuantizedWeights("modelopt_fp4", 4, 16, 1),
    "bitsandbytes": QuantizedWeights("bitsandbytes", 4, 64, 4),
}
#: Other name of a method → its canonical name.
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
    """Return the method's canonical name; aliases may also name a kernel."""
    return _ALIASES.get(method, method)


def usual_weights(method: str) -> QuantizedWeights | None:
    """Return the usual format of `method`, or None if the method is unknown."""
    return _USUAL.get(canonical_method(method))
