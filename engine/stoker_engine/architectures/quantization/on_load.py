"""Quantization on load: matrices and formats of ``--quantization`` for an unquantized checkpoint.

Only the matrices of attention, MLP and experts are quantized, except latent attention's ``k_b`` and ``v_b``: one tensor
of most checkpoints contains both, and ``k_b`` is used transposed. The group size is one unit of codes
(`stored_formats.UNIT`), so small that tensor parallelism can split most rows between groups. On accelerators ``fp8``
has one scale for each row instead, with which FP8 tensor cores multiply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from stoker_engine.architectures.stored_formats import GroupFormat

#: Value of ``--quantization`` → format on CPUs.
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

#: Format of ``fp8`` on accelerators.
FP8_ROWS: Final = GroupFormat("fp8_e4m3", 0, "float32", quantized_activations=True)

_WEIGHT: Final = re.compile(r"layers\.\d{1,9}\.(.*)\.weight")


def matrix_of(param_name: str) -> str:
    """Return the one of `MATRICES` to which the weight, for example ``layers.3.experts.7.gate.weight`` (see
    `models.decoder`), belongs; empty if it is not quantized."""
    match = _WEIGHT.fullmatch(param_name)
    name = "" if match is None else re.sub(r"\.\d+\.", ".", match[1])
    return name if name in MATRICES else ""


def is_quantized(param_name: str) -> bool:
    """Whether the weight belongs to one of `MATRICES`."""
    return bool(matrix_of(param_name))


def formats_on_load(method: str, on_cpu: bool) -> Mapping[str, GroupFormat]:
    """Return the format of each of `MATRICES` that `method` of `ON_LOAD` quantizes on a CPU, or on an accelerator."""
    return dict.fromkeys(MATRICES, FP8_ROWS if method == "fp8" and not on_cpu else ON_LOAD[method])
