"""How large the matrices of a layer are that another engine quantizes when it loads them (``--quantization``).

    bytes  =  numbers × bits ÷ 8  +  numbers ÷ group × bytes of a group's scale and zero point

Which tensors that concerns is said by `sizing.weight_sizes`: matrices of attention, MLP and experts. Embeddings,
head, norms and routers stay as they are. What a checkpoint says of itself is read by `architectures.quantization`, and
counted a matrix at a time (`planned_formats`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class QuantizedWeights:
    """How matrices are stored.

    Attributes:
        method: the name that ``--quantization`` takes.
        bits: of one number.
        group_size: numbers that share a scale; 0: so many (a row, a tensor) that scales weigh nothing.
        group_bytes: of one group's scale and zero point.
    """

    method: str
    bits: float
    group_size: int = 0
    group_bytes: float = 0.0

    def stored_bytes(self, numbers: int) -> int:
        """What `numbers` numbers take."""
        scales = numbers / self.group_size * self.group_bytes if self.group_size else 0.0
        return int(numbers * self.bits / 8 + scales)


#: What a method makes of weights when they are loaded.
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
    """How `method` stores matrices that it quantizes; None: their size is not known."""
    return _USUAL.get(canonical_method(method))
