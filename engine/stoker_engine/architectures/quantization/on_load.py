"""Quantization on load: matrices and formats of ``--quantization`` for an unquantized checkpoint.

Only the matrices of attention, MLP and experts are quantized, except latent attention's ``k_b`` and ``v_b``: one tensor
of most checkpoints contains both, and ``k_b`` is used transposed. The group size is one unit of codes
(`stored_formats.UNIT`), so small that tensor parallelism can split most rows between groups.
"""

from __future__ import annotations

import re
from typing import Final

from stoker_engine.architectures.stored_formats import GroupFormat

#: Value of ``--quantization`` → format.
ON_LOAD: Final = {
    "int8": GroupFormat("int8", 32, "float16"),
    "int4": GroupFormat("uint4", 32, "float16", zero=True),
    "fp8": GroupFormat("fp8_e4m3", 32, "bfloat16"),
}

#: Quantized matrices of a layer: their parameter names without layer, expert index and ``.weight``.
MATRICES: Final = frozenset(
    {"q", "k", "v", "o", "q_a", "q_b", "kv_a"}
    | {f"{mlp}{part}" for mlp in ("", "experts.", "shared.") for part in ("gate", "up", "down")}
)

_WEIGHT: Final = re.compile(r"layers\.\d{1,9}\.(.*)\.weight")


def is_quantized(param_name: str) -> bool:
    """Whether the weight, for example ``layers.3.experts.7.gate.weight`` (see `models.decoder`), is quantized."""
    match = _WEIGHT.fullmatch(param_name)
    return match is not None and re.sub(r"\.\d+\.", ".", match[1]) in MATRICES
